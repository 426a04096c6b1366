"""Export: what is written is what was read, whole or not at all."""

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from memcalib_jax import models
from memcalib_jax.models.weights import export

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 61,
    "hidden_size": 24, "intermediate_size": 40, "moe_intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "rope_theta": 10000.0,
    "num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "tie_word_embeddings": False, "eos_token_id": 5, "dtype": "bfloat16"}
IMAGES_TOO = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    "dtype": "bfloat16", "vision_config": {"hidden_size": 8}, "text_config": {
        "model_type": "ministral3", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "tie_word_embeddings": False,
        "eos_token_id": 2, "dtype": "bfloat16", "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1}}}


def attention_shapes(layer, d=24, heads=4, kv_heads=2, size=8):
    return {f"{layer}.input_layernorm.weight": [d], f"{layer}.post_attention_layernorm.weight": [d],
            f"{layer}.self_attn.q_proj.weight": [heads * size, d],
            f"{layer}.self_attn.k_proj.weight": [kv_heads * size, d],
            f"{layer}.self_attn.v_proj.weight": [kv_heads * size, d],
            f"{layer}.self_attn.o_proj.weight": [d, heads * size]}


def expert_shapes(grouped):
    shapes = {"model.embed_tokens.weight": [61, 24], "model.norm.weight": [24],
              "lm_head.weight": [61, 24]}
    for number in range(2):
        layer = f"model.layers.{number}"
        shapes |= attention_shapes(layer) | {
            f"{layer}.self_attn.q_norm.weight": [8], f"{layer}.self_attn.k_norm.weight": [8],
            f"{layer}.mlp.gate.weight": [3, 24]}
        if grouped:
            shapes |= {f"{layer}.mlp.experts.gate_up_proj": [3, 24, 24],
                       f"{layer}.mlp.experts.down_proj": [3, 24, 12]}
        else:
            for expert in range(3):
                part = f"{layer}.mlp.experts.{expert}"
                shapes |= {f"{part}.gate_proj.weight": [12, 24], f"{part}.up_proj.weight": [12, 24],
                           f"{part}.down_proj.weight": [24, 12]}
    return shapes


def images_too_shapes():
    shapes = {"language_model.model.embed_tokens.weight": [61, 24],
              "language_model.model.norm.weight": [24], "language_model.lm_head.weight": [61, 24],
              "vision_tower.patch_conv.weight": [8, 3, 2, 2],
              "multi_modal_projector.linear_1.weight": [24, 8]}
    for number in range(2):
        layer = f"language_model.model.layers.{number}"
        shapes |= attention_shapes(layer) | {
            f"{layer}.mlp.gate_proj.weight": [40, 24], f"{layer}.mlp.up_proj.weight": [40, 24],
            f"{layer}.mlp.down_proj.weight": [24, 40]}
    return shapes


def whole_qwen3_5():
    """Returns the published form: text under a prefix, experts grouped, other parts beside it."""
    golden = tiny_models.golden("qwen3_5_moe_untied")
    text = golden["config"]
    d, f, count = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    shapes = {name: shape for name, shape in golden["shapes"].items() if ".experts." not in name}
    for number in range(text["num_hidden_layers"]):
        experts = f"model.layers.{number}.mlp.experts"
        shapes |= {f"{experts}.gate_up_proj": [count, 2 * f, d],
                   f"{experts}.down_proj": [count, d, f]}
    shapes = {name.replace("model.", "model.language_model."): shape
              for name, shape in shapes.items()}
    settings = {"architectures": ["Qwen3_5MoeForConditionalGeneration"],
                "model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}}
    return settings, shapes | {"model.visual.patch_embed.proj.weight": [4, 3, 2, 2],
                               "mtp.layers.0.input_layernorm.weight": [d]}


FOLDERS = {
    **{case: (tiny_models.golden(case)["config"], tiny_models.golden(case)["shapes"])
       for case in tiny_models.CASES},
    "experts": (EXPERTS, expert_shapes(grouped=False)),
    "grouped_experts": (EXPERTS, expert_shapes(grouped=True)),
    "images_too": (IMAGES_TOO, images_too_shapes()), "whole_qwen3_5": whole_qwen3_5()}


def write_source(folder, case="llama_tied", dtype=jnp.bfloat16):
    """Writes a model, small tensors in float32 and the rest in `dtype`, and what is beside it."""
    settings, shapes = FOLDERS[case]
    tensors = {name: values.astype(np.float32 if "norm" in name or "A_log" in name else dtype)
               for name, values in tiny_models.random_tensors(shapes, seed=5).items()}
    tiny_models.write_folder(folder, settings | {"of_the_source": True}, tensors)
    for name in ("tokenizer.json", "special_tokens_map.json", "preprocessor_config.json",
                 "chat_template.jinja", "tokenizer.model", "merges.txt"):
        (folder / name).write_text(f"the source's {name}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 9, "top_k": 20}')
    for name in ("README.md", "pytorch_model.bin"):
        (folder / name).write_text("not carried over")
    # None of these is a tokenizer that could be read, and no export should have to.
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").unlink()
    return folder


def tensors_in(folder):
    """Returns dtype, shape and bytes of every tensor, by name."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, values in load_file(path).items():
            assert name not in found
            found[name] = (values.dtype.name, values.shape, values.tobytes())
    return found


def assert_same(params, others):
    jax.tree.map(np.testing.assert_array_equal, params, others)


@pytest.mark.parametrize("case, read_as", [
    *((case, jnp.float32) for case in FOLDERS),
    ("llama_tied", jnp.bfloat16), ("grouped_experts", jnp.bfloat16), ("images_too", jnp.bfloat16),
    ("whole_qwen3_5", jnp.bfloat16)])
def test_import_and_export_are_inverse(case, read_as, tmp_path):
    """Through float32 every bit survives; through bfloat16 every bit of what was bfloat16."""
    source = write_source(tmp_path / "source", case)
    params, config = models.load(source, dtype=read_as)
    models.save(tmp_path / "out", params, config, source=source)
    before, after = tensors_in(source), tensors_in(tmp_path / "out")
    assert before.keys() == after.keys()
    for name in before:
        other_part = name.startswith(("vision_tower.", "model.visual.", "mtp."))
        if read_as == jnp.float32 or before[name][0] == "bfloat16" or other_part:
            assert before[name] == after[name], name
        else:
            assert before[name][:2] == after[name][:2], name
    again, config_again = models.load(tmp_path / "out", dtype=read_as)
    assert config_again == config
    assert_same(params, again)


@pytest.mark.parametrize("case", FOLDERS)
def test_without_a_source(case, tmp_path):
    """The config is written from the families' table, and read as the same one."""
    params, config = models.load(write_source(tmp_path / "source", case))
    models.save(tmp_path / "out", params, config)
    again, config_again = models.load(tmp_path / "out")
    assert config_again == config
    assert_same(params, again)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors"}


def test_everything_but_the_text_weights_comes_from_the_source(tmp_path):
    source = write_source(tmp_path / "source", "images_too")
    params, config = models.load(source)
    models.save(tmp_path / "out", jax.tree.map(lambda x: x + 1, params), config, source=source)
    left_behind = {"README.md", "pytorch_model.bin", "model.safetensors"}
    for path in source.iterdir():
        copy = tmp_path / "out" / path.name
        assert copy.exists() == (path.name not in left_behind | {"model.safetensors"}) or (
            path.name == "model.safetensors")
        if path.name not in left_behind | {"config.json"}:
            assert copy.read_bytes() == path.read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == IMAGES_TOO | {
        "of_the_source": True}
    before, after = tensors_in(source), tensors_in(tmp_path / "out")
    kept = {name for name in before if before[name] == after[name]}
    assert kept == {"vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight"}


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16, np.float16], ids=str)
def test_dtype(dtype, tmp_path):
    source = write_source(tmp_path / "source", "images_too")
    params, config = models.load(source)
    models.save(tmp_path / "out", params, config, dtype=dtype, source=source)
    name = jnp.dtype(dtype).name
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["dtype"] == settings["text_config"]["dtype"] == name
    assert {name: kind for name, (kind, *_) in tensors_in(tmp_path / "out").items()} == {
        key: "bfloat16" if key.startswith(("vision", "multi")) else name
        for key in tensors_in(source)}
    assert_same(models.load(tmp_path / "out")[0],
                jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), params))


def test_dtype_without_a_source(tmp_path):
    params, config = models.load(write_source(tmp_path / "source"), dtype=jnp.bfloat16)
    models.save(tmp_path / "own", params, config)
    models.save(tmp_path / "wide", params, config, dtype=jnp.float32)
    for folder, name in (("own", "bfloat16"), ("wide", "float32")):
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == name
        assert {kind for kind, *_ in tensors_in(tmp_path / folder).values()} == {name}


@pytest.mark.parametrize("case, limit, count", [
    ("llama_tied", 20_000, 4), ("llama_tied", 1, 20), ("grouped_experts", 8000, 4)])
def test_shards(case, limit, count, tmp_path):
    source = write_source(tmp_path / "source", case)
    params, config = models.load(source)
    models.save(tmp_path / "out", params, config, source=source, max_shard_bytes=limit)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        len(values) for *_, values in tensors_in(source).values())
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == (
            tensors.keys())
        assert len(tensors) == 1 or sum(value.nbytes for value in tensors.values()) <= limit
    assert tensors_in(tmp_path / "out") == tensors_in(source)
    assert_same(models.load(tmp_path / "out")[0], params)


def test_layers_are_written_in_order(tmp_path):
    golden = tiny_models.golden("llama_tied")
    settings = golden["config"] | {"num_hidden_layers": 11}
    shapes = {name.replace("layers.1.", f"layers.{number}."): shape
              for name, shape in golden["shapes"].items() for number in range(11)}
    tiny_models.write_folder(tmp_path / "source", settings,
                             tiny_models.random_tensors(shapes, seed=1))
    models.save(tmp_path / "out", *models.load(tmp_path / "source"), source=tmp_path / "source",
                max_shard_bytes=60_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = [index["weight_map"][f"model.layers.{number}.input_layernorm.weight"]
             for number in range(11)]
    assert files == sorted(files) and len(set(files)) > 5


def test_the_file_is_aligned_and_names_its_format(tmp_path):
    params, config = models.load(write_source(tmp_path / "source", "qwen2_tied"))
    models.save(tmp_path / "out", params, config)
    path = tmp_path / "out" / "model.safetensors"
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tied_head_is_not_stored_again(tmp_path):
    source = write_source(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
              source / "model.safetensors")
    params, config = models.load(source)
    models.save(tmp_path / "out", params, config, source=source)
    assert tensors_in(tmp_path / "out").keys() == tensors.keys()


def test_numpy_parameters_and_an_empty_folder_will_do(tmp_path):
    params, config = models.load(write_source(tmp_path / "source", "experts"))
    (tmp_path / "out").mkdir()
    models.save(str(tmp_path / "out"), jax.device_get(params), config)
    assert_same(models.load(tmp_path / "out")[0], params)


def test_sharded_parameters(tmp_path):
    params, config = models.load(write_source(tmp_path / "source"))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    spread = jax.tree.map(lambda x: jax.device_put(x, jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(*[None] * (x.ndim - 1), "data")
        if x.shape[-1] % 2 == 0 else jax.sharding.PartitionSpec())), params)
    models.save(tmp_path / "out", spread, config)
    assert_same(models.load(tmp_path / "out")[0], params)


def test_full_folder_is_refused(tmp_path):
    source = write_source(tmp_path / "source")
    params, config = models.load(source)
    before = {path: path.read_bytes() for path in source.iterdir()}
    for path in (source, source / "config.json"):
        with pytest.raises(models.ModelError, match=f"{path}: already exists and is not empty"):
            models.save(path, params, config, source=source)
    assert {path: path.read_bytes() for path in source.iterdir()} == before


@pytest.mark.parametrize("inside", ["out", "new/out"])
def test_a_folder_that_cannot_be_made_is_refused(inside, tmp_path, monkeypatch):
    config = models.load_config(write_source(tmp_path / "source"))
    (tmp_path / "file").touch()
    with pytest.raises(models.ModelError, match="file is no folder that can be written"):
        export.check(tmp_path / "file" / inside, config)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(models.ModelError, match=f"{tmp_path} is no folder that can be written"):
        export.check(tmp_path / inside, config)


def test_a_link_is_followed(tmp_path):
    params, config = models.load(write_source(tmp_path / "source"))
    (tmp_path / "real").mkdir()
    for name, target in (("link", "real"), ("dangling", "later")):
        (tmp_path / name).symlink_to(target)
        models.save(tmp_path / name, params, config)
        assert_same(models.load(tmp_path / target)[0], params)


def test_another_model_as_source_is_refused(tmp_path):
    params, config = models.load(write_source(tmp_path / "llama"))
    other = write_source(tmp_path / "qwen", "qwen3_tied")
    with pytest.raises(models.ModelError, match="qwen: this is a model of another shape"):
        models.save(tmp_path / "out", params, config, source=other)
    with pytest.raises(models.ModelError, match="absent: there is no such file"):
        models.save(tmp_path / "out", params, config, source=tmp_path / "absent")
    assert not (tmp_path / "out").exists()


def test_other_parameters_are_refused(tmp_path):
    params, config = models.load(write_source(tmp_path / "source"))
    with pytest.raises(ValueError, match="tree and shapes of config.parameter_shapes"):
        models.save(tmp_path / "out", params | {"head": params["embed"]}, config)


def test_integer_dtype_is_refused(tmp_path):
    params, config = models.load(write_source(tmp_path / "source"))
    with pytest.raises(ValueError, match="floating-point, not int8"):
        models.save(tmp_path / "out", params, config, dtype=np.int8)


def test_too_little_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    params, config = models.load(write_source(tmp_path / "source"))
    export.check(tmp_path / "a" / "out", config)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    monkeypatch.setattr(shutil, "disk_usage",
                        lambda path: types.SimpleNamespace(free=size - 1))
    with pytest.raises(models.ModelError, match="out: the weights take 0.0 GB, and 0.0 GB are"):
        export.check(tmp_path / "a" / "out", config)
    with pytest.raises(models.ModelError, match="out: the weights take 0.0 GB, and 0.0 GB are"):
        models.save(tmp_path / "a" / "out", params, config)
    export.check(tmp_path / "a" / "out", config, dtype=jnp.bfloat16)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("broken", ["write_file", "_write_json"])
def test_a_failure_leaves_nothing(broken, tmp_path, monkeypatch):
    params, config = models.load(write_source(tmp_path / "source"))

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(export, broken, fail)
    with pytest.raises(OSError, match="disk full"):
        models.save(tmp_path / "out", params, config)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


DIES = """
import os, sys
from memcalib_jax import models
from memcalib_jax.models.weights import export
source, out, function = sys.argv[1:]
params, config = models.load(source)
setattr(export, function, lambda *args: os._exit(9))
models.save(out, params, config, source=source)
"""


@pytest.mark.parametrize("function", ["write_file", "_write_json"])
def test_a_killed_export_is_no_model_and_no_obstacle(function, tmp_path):
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    process = subprocess.run([sys.executable, "-c", DIES, str(source), str(out), function],
                             cwd=Path(__file__).parents[2], timeout=120)
    assert process.returncode == 9
    assert not out.exists()
    left, = (path for path in tmp_path.iterdir() if path != source)
    with pytest.raises(models.ModelError, match="no config.json"):
        models.load(left)
    params, config = models.load(source)
    models.save(out, params, config, source=source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert_same(models.load(out)[0], params)


@pytest.mark.parametrize("case, with_source", [
    ("llama_tied", True), ("grouped_experts", True),
    *((case, False) for case in tiny_models.CASES)])
def test_transformers_gives_the_same_logits(case, with_source, tmp_path):
    torch = pytest.importorskip("torch")
    import torch_models
    import transformers

    source = write_source(tmp_path / "source", case, np.float32)
    (source / "config.json").write_text(json.dumps(FOLDERS[case][0] | {"dtype": "float32"}))
    params, config = models.load(source)
    models.save(tmp_path / "out", params, config, source=source if with_source else None)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager")
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == (9 if with_source else list(config.eos_ids))
    tokens, lengths = tiny_models.random_rows(config.vocab_size, seed=8)
    with torch.no_grad():
        theirs = torch_models.run(model, tokens, lengths)[0].numpy()
    ours = models.logits(params, config, tokens, lengths)
    valid = np.arange(tokens.shape[1]) < lengths[:, None]
    np.testing.assert_allclose(ours[valid], theirs[valid], atol=1e-4 * np.abs(theirs).max())
