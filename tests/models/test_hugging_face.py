"""Hugging Face folders: what is read, and everything that must be refused by name."""

import json
import math
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny_models
from safetensors.numpy import load_file, save_file

from memcalib_jax import models
from memcalib_jax.models.config import Experts
from memcalib_jax.models.rope import QueryScale, Rope, Yarn
from memcalib_jax.models.weights.config_json import read_config

GOLDEN = {case: tiny_models.golden(case) for case in tiny_models.CASES}


def tensors_of(case):
    return tiny_models.random_tensors(GOLDEN[case]["shapes"], seed=3)


def write(folder, case="llama_tied", *, settings=(), without=(), **tensors):
    """Writes a small checkpoint with some settings and tensors replaced, added or left out."""
    config = {key: value for key, value in (GOLDEN[case]["config"] | dict(settings)).items()
              if key not in without}
    kept = {key: value for key, value in (tensors_of(case) | tensors).items()
            if key not in without}
    return tiny_models.write_folder(folder, config, kept)


def write_shards(folder, case="llama_tied"):
    """Writes the same in two shards with an index; returns the names in each."""
    write(folder, case)
    tensors = tensors_of(case)
    (folder / "model.safetensors").unlink()
    names = [sorted(tensors)[::2], sorted(tensors)[1::2]]
    index = {}
    for i, part in enumerate(names, 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return names


def assert_refused(folder, *expected):
    """The refusal names the folder and each expected text, from the headers alone."""
    with pytest.raises(models.ModelError) as caught:
        models.load_config(folder)
    for text in (str(folder), *expected):
        assert text in str(caught.value)


def test_config_fields(tmp_path):
    config = models.load_config(write(tmp_path, "qwen3_untied"))
    assert config == models.ModelConfig(
        family="qwen3", vocab_size=59, hidden_size=32, intermediate_size=56, num_layers=2,
        num_heads=6, num_kv_heads=3, head_dim=10, rope=Rope(1e6), norm_eps=1e-6,
        attention_bias=False, qk_norm=True, tie_embeddings=False, max_positions=256,
        eos_ids=(3, 7))


def test_older_settings(tmp_path):
    """rope_theta at the root, null rope_scaling, no head_dim, no key heads, no tie."""
    settings = {"rope_theta": 50000.0, "rope_scaling": None, "hidden_act": "silu"}
    config = models.load_config(write(
        tmp_path, "llama_untied", settings=settings.items(),
        without=("rope_parameters", "head_dim", "num_key_value_heads", "tie_word_embeddings")))
    assert (config.rope.theta, config.head_dim, config.num_kv_heads) == (50000.0, 8, 4)
    assert not config.tie_embeddings


@pytest.mark.parametrize("rope", [
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 8.0},
    {"rope_parameters": None, "rope_scaling": {"type": "default"}, "rope_theta": 7.0},
    {"rope_parameters": None, "rope_theta": 7.0}], ids=str)
def test_rope_theta(rope, tmp_path):
    assert models.load_config(write(tmp_path, settings=rope.items())).rope.theta == 7.0


def test_rope_theta_defaults_to_ten_thousand(tmp_path):
    folder = write(tmp_path, without=("rope_parameters", "rope_theta"))
    assert models.load_config(folder).rope.theta == 10000.0


def test_sliding_window_not_in_use(tmp_path):
    settings = {"sliding_window": 4096, "use_sliding_window": False, "layer_types": None}
    assert models.load_config(write(tmp_path, "qwen2_tied", settings=settings.items()))
    settings |= {"use_sliding_window": True, "max_window_layers": 2}
    assert models.load_config(write(tmp_path, "qwen2_tied", settings=settings.items()))


@pytest.mark.parametrize("case, settings, expected", [
    ("llama_tied", {"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
    ("llama_tied", {"architectures": None}, "(none named)"),
    ("llama_tied", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ("llama_tied", {"hidden_act": "gelu"}, "gelu"),
    ("llama_tied", {"attention_bias": True}, "attention_bias"),
    ("llama_tied", {"mlp_bias": True}, "mlp_bias"),
    ("qwen3_tied", {"attention_bias": True}, "attention_bias"),
    ("llama_tied", {"rope_parameters": {"rope_type": "longrope", "factor": 8.0}}, "longrope"),
    ("llama_tied", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
     "low_freq_factor of llama3"),
    ("qwen2_tied", {"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, "factor of yarn"),
    ("qwen2_tied", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": -2}},
     "factor of linear"),
    ("qwen2_tied", {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
     "full_attention"),
    ("qwen2_tied", {"rope_parameters": "yarn"}, "yarn"),
    ("qwen3_tied", {"layer_types": ["full_attention", "linear_attention"]}, "sliding_window"),
    ("llama_tied", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("qwen2_tied", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
    ("qwen3_tied", {"layer_types": None, "use_sliding_window": True, "sliding_window": 8,
                    "max_window_layers": 1}, "sliding_window"),
    ("llama_tied", {"hidden_size": None}, "hidden_size"),
    ("llama_tied", {"vocab_size": "59"}, "vocab_size"),
    ("llama_tied", {"num_hidden_layers": 2.0}, "num_hidden_layers"),
    ("llama_tied", {"num_key_value_heads": 4}, "num_kv_heads (4)"),
    # A wrong number of layers must not fill the memory before it is found out.
    ("llama_tied", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("qwen3_5_tied", {"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers"),
    ("qwen3_moe_tied", {"num_experts": 10**9}, "num_experts"),
    ("llama_tied", {"rope_parameters": {"rope_type": "default", "rope_theta": math.inf}},
     "rope_theta"),
    ("llama_tied", {"rope_parameters": {"rope_type": "default", "rope_theta": math.nan}},
     "rope_theta"),
    ("llama_tied", {"rms_norm_eps": math.nan}, "rms_norm_eps"),
    ("llama_tied", {"rope_parameters": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}, "high_freq_factor is 4.0"),
    # Entries of another kind than any config has.
    ("llama_tied", {"architectures": [["LlamaForCausalLM"]]}, "['LlamaForCausalLM']"),
    ("llama_tied", {"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type is ['yarn']"),
    ("llama_tied", {"text_config": ["text"]}, "text_config is ['text']"),
    ("llama_tied", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
    ("llama_tied", {"eos_token_id": {"id": 2}}, "eos_token_id"),
    ("llama_tied", {"eos_token_id": [[2]]}, "eos_token_id"),
    ("llama_tied", {"eos_token_id": "2"}, "eos_token_id"),
    ("qwen3_tied", {"layer_types": 5}, "layer_types is 5"),
    ("qwen3_tied", {"layer_types": [["full_attention"]] * 2}, "layer_types"),
    ("qwen2_tied", {"layer_types": None, "use_sliding_window": True, "sliding_window": 8,
                    "max_window_layers": "1"}, "sliding_window"),
], ids=str)
def test_refused_settings(case, settings, expected, tmp_path):
    assert_refused(write(tmp_path, case, settings=settings.items()), "config.json", expected)


def test_shards_equal_one_file(tmp_path):
    write(tmp_path / "whole")
    write_shards(tmp_path / "shards")
    whole, shards = (models.load(tmp_path / name) for name in ("whole", "shards"))
    assert whole[1] == shards[1]
    np.testing.assert_array_equal(whole[0]["layers"]["gate"], shards[0]["layers"]["gate"])
    np.testing.assert_array_equal(whole[0]["embed"], shards[0]["embed"])


def test_missing_shard(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert_refused(tmp_path, "missing model-00002-of-00002.safetensors")


def test_shard_without_a_promised_tensor(tmp_path):
    first, second = write_shards(tmp_path)
    tensors = tensors_of("llama_tied")
    save_file({name: tensors[name] for name in second[1:]},
              tmp_path / "model-00002-of-00002.safetensors")
    assert_refused(tmp_path, "model-00002-of-00002.safetensors", second[0])


def test_tensor_in_two_shards(tmp_path):
    first, second = write_shards(tmp_path)
    tensors = tensors_of("llama_tied")
    save_file({name: tensors[name] for name in second + first[:1]},
              tmp_path / "model-00002-of-00002.safetensors")
    assert_refused(tmp_path, f"{first[0]} is stored twice")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(keep, tmp_path):
    file = write(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert_refused(tmp_path, "model.safetensors", "not a whole safetensors file")


def test_pointer_instead_of_the_file(tmp_path):
    (write(tmp_path) / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert_refused(tmp_path, "model.safetensors", "pointer")


def test_no_config(tmp_path):
    (write(tmp_path) / "config.json").unlink()
    assert_refused(tmp_path, "no config.json")


def test_broken_config(tmp_path):
    (write(tmp_path) / "config.json").write_text('{"hidden_size": 4')
    assert_refused(tmp_path, "config.json", "JSON")
    (tmp_path / "config.json").write_text("[1]")
    assert_refused(tmp_path, "config.json", "list")


def test_config_nested_without_end(tmp_path):
    (write(tmp_path) / "config.json").write_text("[" * 100_000)
    assert_refused(tmp_path, "config.json: not readable as JSON")


@pytest.mark.parametrize("file", [3, ["a"], None])
def test_index_that_names_no_file(file, tmp_path):
    write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    assert_refused(tmp_path, f"weight_map must name the file of model.norm.weight, not {file!r}")


def test_no_weights(tmp_path):
    (write(tmp_path) / "model.safetensors").unlink()
    assert_refused(tmp_path, "neither model.safetensors nor")
    (tmp_path / "pytorch_model.bin").touch()
    assert_refused(tmp_path, "pytorch_model.bin", "convert")


def test_empty_folder(tmp_path):
    assert_refused(tmp_path, "no config.json")
    (tmp_path / "model.gguf").touch()
    assert_refused(tmp_path, "name the .gguf file itself")


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("case, change, expected", [
    ("llama_tied", {"without": (Q,)}, f"missing: {Q}"),
    ("llama_tied", {"extra.weight": np.ones(3, np.float32)}, "left over: extra.weight"),
    ("llama_tied", {Q: np.ones((48, 47), np.float32)},
     f"wrong shape: {Q} is [48, 47], expected [48, 48]"),
    ("llama_tied", {"settings": [("num_hidden_layers", 1)]}, "left over: model.layers.1"),
    ("llama_tied", {"settings": [("num_hidden_layers", 3)]}, "missing: model.layers.2"),
    # A bias that the family does not have, and one that it does.
    ("llama_tied", {"model.layers.0.self_attn.q_proj.bias": np.ones(48, np.float32)},
     "left over: model.layers.0.self_attn.q_proj.bias"),
    ("qwen2_tied", {"without": ("model.layers.1.self_attn.v_proj.bias",)},
     "missing: model.layers.1.self_attn.v_proj.bias"),
    ("qwen3_tied", {"without": ("model.layers.0.self_attn.k_norm.weight",)},
     "missing: model.layers.0.self_attn.k_norm.weight"),
    # Untied, by the config or for lack of a word in it, and no head.
    ("qwen2_untied", {"without": ("lm_head.weight",)}, "missing: lm_head.weight"),
    ("llama_tied", {"without": ("tie_word_embeddings",)}, "missing: lm_head.weight"),
    # Heads of a size that hidden_size / num_heads does not give.
    ("llama_wide_heads", {"without": ("head_dim",)}, "is [80, 32], expected [32, 32]"),
    ("qwen3_tied", {"without": ("head_dim",)}, "is [80, 40], expected [640, 40]"),
], ids=str)
def test_tensors_that_do_not_fit(case, change, expected, tmp_path):
    assert_refused(write(tmp_path, case, **change), expected)


def test_long_lists_are_cut(tmp_path):
    names = tuple(name for name in GOLDEN["llama_tied"]["shapes"] if "layers" in name)
    assert_refused(write(tmp_path, without=names), "and 10 more")


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
def test_weights_that_are_not_floats(dtype, tmp_path):
    assert_refused(write(tmp_path, **{Q: np.ones((48, 48), dtype)}), Q, "dtype")


def test_tied_head_that_is_a_copy_is_ignored(tmp_path):
    embed = tensors_of("llama_tied")["model.embed_tokens.weight"]
    params, config = models.load(write(tmp_path, **{"lm_head.weight": embed}))
    assert config.tie_embeddings and "head" not in params


def test_tied_head_that_differs_is_refused(tmp_path):
    head = tensors_of("llama_tied")["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1e-3
    assert_refused(write(tmp_path, **{"lm_head.weight": head}), "lm_head.weight differs")


def test_rotary_buffers_are_ignored(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert models.load_config(write(tmp_path, **{name: np.ones(4, np.float32)}))


def write_wrapped(folder, case="ministral3_untied", *, old_names=True, text=(), **settings):
    """Writes a text model as the text part of a model of images and text."""
    settings = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
                "vision_config": {"hidden_size": 8}, "tie_word_embeddings": case.endswith("_tied"),
                "text_config": GOLDEN[case]["config"] | dict(text)} | settings
    vision = ("vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight")
    tensors = {f"model.{name}" * (not old_names) or name: np.ones(3, np.float32)
               for name in vision}
    for name, values in tensors_of(case).items():
        inner = name.removeprefix("model.")
        tensors[f"language_model.{name}" if old_names else
                name if inner == name else f"model.language_model.{inner}"] = values
    return tiny_models.write_folder(folder, settings, tensors)


@pytest.mark.parametrize("old_names", [True, False])
@pytest.mark.parametrize("case", ["ministral3_tied", "ministral3_untied"])
def test_text_part_of_a_larger_model(case, old_names, tmp_path):
    plain = models.load(write(tmp_path / "plain", case))
    wrapped = models.load(write_wrapped(tmp_path / "wrapped", case, old_names=old_names))
    assert wrapped[1] == plain[1]
    assert jax.tree.all(jax.tree.map(np.array_equal, wrapped[0], plain[0]))


@pytest.mark.parametrize("change, expected", [
    ({"text": {"model_type": "mistral"}}, "text_config.model_type is 'mistral'"),
    ({"text_config": None}, "text_config is None"),
    ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ({"text": {"rope_parameters": {"rope_type": "dynamic"}}}, "rope_type is 'dynamic'"),
    ({"text": {"sliding_window": 16}}, "sliding_window"),
    ({"text": {"hidden_act": "gelu"}}, "hidden_act"),
    ({"text": {"rope_parameters": {"llama_4_scaling_beta": -1.0}}}, "llama_4_scaling_beta"),
    ({"text": {"num_hidden_layers": 1}}, "left over: model.layers.1"),
], ids=str)
def test_refused_parts_of_a_larger_model(change, expected, tmp_path):
    assert_refused(write_wrapped(tmp_path, **change), expected)


def test_unknown_tensor_of_a_larger_model(tmp_path):
    folder = write_wrapped(tmp_path)
    save_file({"audio_tower.weight": np.ones(3, np.float32)}, folder / "more.safetensors")
    names = {"audio_tower.weight": "more.safetensors"} | dict.fromkeys(
        load_file(folder / "model.safetensors"), "first.safetensors")
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert_refused(folder, "left over: audio_tower.weight")


@pytest.mark.parametrize("root, text, case, tied", [
    (None, True, "ministral3_tied", True), (True, None, "ministral3_tied", True),
    (None, False, "ministral3_untied", False), (False, None, "ministral3_untied", False),
    # A contradiction is settled by the head that is there, or is not.
    (False, True, "ministral3_tied", True), (True, False, "ministral3_tied", True),
    (False, True, "ministral3_untied", False), (True, False, "ministral3_untied", False)])
def test_ties_at_the_root_and_in_the_text_config(root, text, case, tied, tmp_path):
    folder = write_wrapped(tmp_path, case, text={"tie_word_embeddings": text},
                           tie_word_embeddings=root)
    params, config = models.load(folder)
    assert config.tie_embeddings == tied and ("head" in params) != tied


def test_contradicting_ties_without_tensors_are_refused():
    settings = {"architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": True,
                "text_config": GOLDEN["ministral3_tied"]["config"] | {"tie_word_embeddings": False}}
    with pytest.raises(models.ModelError, match="config.json: tie_word_embeddings is"):
        read_config(settings, Path("config.json"))


def test_scaled_rope_and_experts_in_the_config(tmp_path):
    config = models.load_config(write(tmp_path / "a", "ministral3_untied"))
    assert config.rope == Rope(1000.0, 1.0, Yarn(
        8.0, 4, beta_fast=1.0, beta_slow=0.02, mscale=1.0, mscale_all_dim=0.5, truncate=False))
    assert config.query_scale == QueryScale(0.5, 4)
    config = models.load_config(write(tmp_path / "b", "qwen3_moe_untied"))
    assert config.experts == Experts(8, 3, normalize=True, shared_size=0)
    assert config.intermediate_size == 20
    config = models.load_config(write(tmp_path / "c", "qwen3_moe_tied"))
    assert config.experts == Experts(5, 2, normalize=False, shared_size=0)
    longest = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    config = models.load_config(write(
        tmp_path / "d", "qwen2_tied", settings={"rope_parameters": longest}.items()))
    assert config.rope == Rope(1e6, 1.0, Yarn(4.0, original_max_position_embeddings=256))


def one_by_one(tensors):
    """Returns a Qwen3-MoE's grouped tensors as one tensor an expert and matrix."""
    single = {}
    for name, values in tensors.items():
        prefix, _, kind = name.rpartition(".")
        for expert in range(len(values) if "experts" in name else 0):
            if kind == "down_proj":
                single[f"{prefix}.{expert}.down_proj.weight"] = values[expert]
            else:
                for part, rows in zip(("gate", "up"), np.split(values[expert], 2)):
                    single[f"{prefix}.{expert}.{part}_proj.weight"] = rows.copy()
        if "experts" not in name:
            single[name] = values
    return single


def test_grouped_experts_equal_single_ones(tmp_path):
    grouped = models.load(write(tmp_path / "grouped", "qwen3_moe_untied"))
    single = models.load(tiny_models.write_folder(
        tmp_path / "single", GOLDEN["qwen3_moe_untied"]["config"],
        one_by_one(tensors_of("qwen3_moe_untied"))))
    assert grouped[1] == single[1]
    assert jax.tree.all(jax.tree.map(np.array_equal, grouped[0], single[0]))
    assert grouped[0]["layers"]["expert_gate"].shape == (2, 8, 24, 20)


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
GROUP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("change, expected", [
    ({"settings": [("mlp_only_layers", [0])]}, "mlp_only_layers is [0]"),
    ({"settings": [("decoder_sparse_step", 2)]}, "decoder_sparse_step is 2"),
    ({"settings": [("num_experts_per_tok", 9)]}, "experts per token (9)"),
    ({"without": ("num_experts_per_tok",)}, "num_experts_per_tok must be a positive int, not None"),
    ({"without": ("moe_intermediate_size",)}, "moe_intermediate_size must be a positive int"),
    ({"settings": [("moe_intermediate_size", 19)]}, "is [8, 24, 20], expected [8, 24, 19]"),
    ({"settings": [("use_sliding_window", True), ("sliding_window", 8)]}, "sliding_window"),
    # Some experts grouped, one on its own.
    ({EXPERT: np.ones((20, 24), np.float32)}, f"one by one ({EXPERT})"),
    ({GROUP: np.ones((7, 40, 24), np.float32)}, f"{GROUP} is [7, 40, 24], expected [8, 40, 24]"),
    ({GROUP: np.ones((8, 40), np.float32)}, f"{GROUP} is [8, 40]"),
    ({"without": (GROUP,)}, "missing: model.layers.1.mlp.experts.0.gate_proj.weight"),
    ({"without": ("model.layers.0.mlp.gate.weight",)}, "missing: model.layers.0.mlp.gate.weight"),
], ids=str)
def test_refused_experts(change, expected, tmp_path):
    assert_refused(write(tmp_path, "qwen3_moe_untied", **change), expected)


@pytest.mark.parametrize("config_eos, generation_eos, expected", [
    (7, None, (7,)), (None, None, ()), (7, [9, 3], (3, 7, 9)), ([5, 7], 7, (5, 7))], ids=str)
def test_eos_ids_unite(config_eos, generation_eos, expected, tmp_path):
    folder = write(tmp_path, settings=[("eos_token_id", config_eos)])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    assert models.load_config(folder).eos_ids == expected


def test_eos_of_the_tokenizer(tmp_path):
    """A tokenizer's own end of sequence joins those of the configs."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocab = {word: i for i, word in enumerate(["a", "b", "<end>", "[UNK]"])}
    Tokenizer(WordLevel(vocab, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}))
    write(tmp_path, settings=[("eos_token_id", 0)])
    assert models.load_config(tmp_path).eos_ids == (0, 2)
    assert models.load_tokenizer(tmp_path).eos_token_id == 2


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(models.ModelError, match="there is no tokenizer"):
        models.load_tokenizer(write(tmp_path))


def test_damaged_tokenizer(tmp_path):
    (write(tmp_path) / "tokenizer.json").write_text('{"model": 1')
    with pytest.raises(models.ModelError, match="tokenizer cannot be read"):
        models.load_tokenizer(tmp_path)


