"""Adapters in the PEFT library's format: its own, ours read by it, and every refusal."""

import json
import math
import re

import adapters
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from memcalib_jax import models
from memcalib_jax.models.lora import LoraConfig, adapter_shapes, target_paths, with_adapter
from memcalib_jax.models.weights.peft import load_adapter, save_adapter

BASES = ("llama_untied", "qwen2_tied", "qwen3_tied", "qwen3_5_moe_untied")
KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def random_adapter(config, lora, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(0.2 * rng.normal(size=shape), jnp.float32),
        adapter_shapes(config, lora), is_leaf=lambda x: isinstance(x, tuple))


def assert_close(ours, theirs, lengths):
    valid = np.arange(ours.shape[1]) < lengths[:, None]
    assert np.abs((ours - theirs)[valid]).max() < 1e-4 * np.abs(theirs[valid]).max()


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Parameters, config, tokens and lengths of each golden base model."""
    loaded = {}
    for case in BASES:
        folder, tokens, lengths = adapters.write_base(tmp_path_factory.mktemp("base"), case)
        loaded[case] = *models.load(folder), tokens, lengths
    return loaded


@pytest.mark.parametrize("case", BASES)
def test_an_adapter_that_peft_wrote_gives_its_logits(case, bases, tmp_path):
    params, config, tokens, lengths = bases[case]
    golden = tiny_models.golden(f"adapter_{case}")
    adapters.write_folder(tmp_path, json.dumps(golden["config"]), golden["shapes"],
                          golden["seed"])
    adapter, lora = load_adapter(tmp_path, config)
    assert (lora.rank, lora.alpha) == (3, 5)
    assert sorted(lora.targets) == sorted(golden["config"]["target_modules"])
    ours = models.logits(with_adapter(params, adapter, lora), config, tokens, lengths)
    assert_close(ours, golden["logits"], lengths)
    stored = tiny_models.golden(case)["logits"]
    valid = np.arange(tokens.shape[1]) < lengths[:, None]
    assert np.abs((ours - stored)[valid]).max() > 0.1 * np.abs(stored).max()


@pytest.mark.parametrize("case", BASES)
def test_written_names_and_shapes_are_those_of_peft(case, bases, tmp_path):
    _, config, _, _ = bases[case]
    golden = tiny_models.golden(f"adapter_{case}")
    lora = LoraConfig(3, 5, tuple(golden["config"]["target_modules"]))
    save_adapter(tmp_path, random_adapter(config, lora), lora, config, "some/base")
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert {name: list(value.shape) for name, value in written.items()} == golden["shapes"]
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings.keys() <= golden["config"].keys()
    assert settings["base_model_name_or_path"] == "some/base"


@pytest.mark.parametrize("case, lora", [
    ("llama_untied", LoraConfig(3, 5)), ("qwen2_tied", LoraConfig(1, 0.5, ("k_proj", "o_proj"))),
    ("qwen3_tied", LoraConfig(7, 2, ("down_proj",)))])
def test_round_trip_is_exact(case, lora, bases, tmp_path):
    config = bases[case][1]
    adapter = random_adapter(config, lora)
    save_adapter(tmp_path, adapter, lora, config, "base")
    loaded, again = load_adapter(tmp_path, config)
    assert (again.rank, again.alpha) == (lora.rank, lora.alpha)
    assert target_paths(config, again.targets) == target_paths(config, lora.targets)
    loaded, adapter = flatten_dict(loaded), flatten_dict(adapter)
    assert loaded.keys() == adapter.keys()
    for path, values in adapter.items():
        np.testing.assert_array_equal(loaded[path], values)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("case", ["llama_untied", "qwen3_5_moe_untied"])
def test_peft_reads_ours(case, bases, tmp_path):
    pytest.importorskip("peft")
    params, config, tokens, lengths = bases[case]
    lora = LoraConfig(4, 6.0)
    adapter = random_adapter(config, lora, seed=3)
    save_adapter(tmp_path / "ours", adapter, lora, config, "base")
    theirs, model = adapters.peft_logits(case, tmp_path / "ours")
    ours = models.logits(with_adapter(params, adapter, lora), config, tokens, lengths)
    assert_close(ours, theirs, lengths)
    model.save_pretrained(str(tmp_path / "theirs"))
    loaded, _ = load_adapter(tmp_path / "theirs", config)
    jax.tree.map(np.testing.assert_array_equal, loaded, adapter)


@pytest.fixture
def written(bases, tmp_path):
    """A small adapter on disk; returns its folder and the base's config."""
    config, lora = bases["llama_untied"][1], LoraConfig(3, 6.0, ("q", "down"))
    save_adapter(tmp_path, random_adapter(config, lora), lora, config, "base")
    return tmp_path, config


@pytest.mark.parametrize("key, value", [
    ("use_rslora", True), ("use_dora", True), ("bias", "lora_only"), ("bias", "all"),
    ("modules_to_save", ["lm_head"]), ("fan_in_fan_out", True), ("rank_pattern", {"q_proj": 2}),
    ("alpha_pattern", {"q_proj": 2}), ("layers_to_transform", [0]), ("lora_bias", True),
    ("trainable_token_indices", [1]), ("target_parameters", ["mlp.experts.gate_up_proj"]),
    ("layer_replication", [[0, 1]]), ("init_lora_weights", "pissa_niter_4"),
    ("peft_type", "IA3"), ("r", 0), ("r", 2.5), ("lora_alpha", "big"),
    ("lora_alpha", math.inf), ("lora_alpha", math.nan),
    ("a_later_feature", {"x": 1}),
])
def test_what_is_more_than_a_plain_adapter_is_refused_by_name(written, key, value):
    folder, config = written
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(models.ModelError, match=f"adapter_config.json: {key} is "):
        load_adapter(folder, config)


def change(tensors, **changes):
    return {name: value for name, value in (tensors | changes).items() if value is not None}


@pytest.mark.parametrize("changes, message", [
    ({KEY: None}, f"missing: {KEY}"),
    ({KEY: np.zeros((3, 31), np.float32)}, f"wrong shape: {KEY} is [3, 31], expected [3, 32]"),
    ({KEY.replace("layers.1", "layers.2"): np.zeros((3, 32), np.float32)},
     f"left over: {KEY.replace('layers.1', 'layers.2')}"),
    ({KEY.removeprefix("base_model."): np.zeros((3, 32), np.float32)},
     f"left over: {KEY.removeprefix('base_model.')}"),
    ({"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((3, 59), np.float32)},
     "left over: base_model.model.model.embed_tokens.lora_embedding_A"),
])
def test_every_tensor_has_its_one_place(written, changes, message):
    folder, config = written
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path), **changes), path)
    with pytest.raises(models.ModelError, match=re.escape(message)):
        load_adapter(folder, config)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_and_damaged_files_are_named(written, file):
    folder, config = written
    (folder / file).write_text("{")
    with pytest.raises(models.ModelError, match=file):
        load_adapter(folder, config)
    (folder / file).unlink()
    with pytest.raises(models.ModelError, match="adapter_config.json and adapter_model"):
        load_adapter(folder, config)


def test_half_precision_is_read_as_float32(written):
    folder, config = written
    path = folder / "adapter_model.safetensors"
    halves = {name: value.astype(jnp.bfloat16) for name, value in load_file(path).items()}
    save_file(halves, path)
    loaded, _ = load_adapter(folder, config)
    q = loaded["layers"]["q_lora_a"]
    assert q.dtype == np.float32
    np.testing.assert_array_equal(q[1].T, halves[KEY].astype(np.float32))


def test_an_adapter_of_a_model_of_images_and_text_fits_its_text_part(written):
    folder, config = written
    before, _ = load_adapter(folder, config)
    path = folder / "adapter_model.safetensors"
    save_file({name.replace("model.layers.", "model.language_model.layers."): value
               for name, value in load_file(path).items()}, path)
    after, _ = load_adapter(folder, config)
    jax.tree.map(np.testing.assert_array_equal, after, before)
