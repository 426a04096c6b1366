"""GGUF files: the same models as in Hugging Face folders, and what must be refused."""

import dataclasses

import gguf
import jax
import numpy as np
import pytest
import tiny_models

from memcalib_jax import models

# llama.cpp's names, written out apart from the loader's table.
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down"}


def gguf_name(name):
    name, _, kind = name.rpartition(".")
    if name.startswith("model.layers."):
        _, _, layer, part = name.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[name]}.{kind}"


def interleave(rows, heads):
    """Puts row i of each half of a head at 2i and 2i + 1, as llama.cpp's llama wants it."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


def write(path, case="llama_tied", *, without=(), kind=None, **metadata):
    """Writes a small model as GGUF, with some metadata replaced (or None: left out)."""
    golden = tiny_models.golden(case)
    settings, family = golden["config"], golden["config"]["model_type"]
    heads = {"q": settings["num_attention_heads"], "k": settings["num_key_value_heads"]}
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", family))
    numbers = {
        "block_count": 2, "context_length": 256, "embedding_length": settings["hidden_size"],
        "feed_forward_length": 56, "attention.head_count": heads["q"],
        "attention.head_count_kv": heads["k"],
        "rope.freq_base": settings["rope_parameters"]["rope_theta"],
        "attention.layer_norm_rms_epsilon": settings["rms_norm_eps"], "vocab_size": 59}
    if "head_dim" in settings:
        numbers["attention.key_length"] = settings["head_dim"]
    numbers |= {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in numbers.items():
        key = key if key.startswith(("tokenizer.", "split.")) else f"{family}.{key}"
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        if value is not None:
            add[type(value)](key, value)
    for name, values in tiny_models.random_tensors(golden["shapes"], seed=5).items():
        if name in without:
            continue
        if family == "llama" and (".q_proj" in name or ".k_proj" in name):
            values = interleave(values, heads[name.partition("self_attn.")[2][0]])
        writer.add_tensor(gguf_name(name), values)
    if kind:
        writer.add_tensor("odd.weight", np.zeros((1, 292), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", tiny_models.GGUF_CASES)
def test_equals_the_hugging_face_folder(case, tmp_path):
    golden = tiny_models.golden(case)
    folder = tiny_models.write_folder(tmp_path, golden["config"],
                                      tiny_models.random_tensors(golden["shapes"], seed=5))
    params, config = models.load(write(tmp_path / "model.gguf", case, **{
        "tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 3}))
    expected, expected_config = models.load(folder)
    assert config.norm_eps == pytest.approx(expected_config.norm_eps)  # float32 in the file
    assert config == dataclasses.replace(expected_config, norm_eps=config.norm_eps)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_defaults(tmp_path):
    """No base of rotary positions, no vocabulary size, no key heads, no head size, no eos."""
    config = models.load_config(write(tmp_path / "model.gguf", "llama_untied", **{
        "rope.freq_base": None, "vocab_size": None, "attention.head_count_kv": None,
        "attention.key_length": None}))
    assert (config.rope.theta, config.vocab_size, config.num_kv_heads, config.head_dim) == (
        10000.0, 59, 4, 8)
    assert config.eos_ids == ()


def test_dequantizes(tmp_path):
    """Q8_0 holds 32 values as int8 times a float16 scale."""
    path = write(tmp_path / "model.gguf", "qwen2_tied")
    values = tiny_models.random_tensors(tiny_models.golden("qwen2_tied")["shapes"], 5)
    writer = gguf.GGUFWriter(tmp_path / "q8.gguf", "qwen2")
    reader = gguf.GGUFReader(path)
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length",
                "attention.head_count", "attention.head_count_kv", "vocab_size"):
        writer.add_uint32(f"qwen2.{key}", reader.get_field(f"qwen2.{key}").contents())
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            packed = gguf.quantize(tensor.data, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(tensor.name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    embed = np.asarray(models.load(tmp_path / "q8.gguf")[0]["embed"])
    exact = values["model.embed_tokens.weight"]
    scale = (np.abs(exact).max(axis=1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(embed, np.round(exact / scale) * scale, atol=scale.max() * 1.01)
    assert np.abs(embed - exact).max() < 0.51 * scale.max() + 1e-3


@pytest.mark.parametrize("change, expected", [
    ({"architecture": "gemma3"}, "unknown architecture gemma3"),
    ({"split.count": 3}, "one of several parts"),
    ({"rope.scaling.type": "yarn"}, "yarn"),
    ({"rope.dimension_count": 4}, "4 of 8 dimensions"),
    ({"attention.sliding_window": 128}, "sliding window (128)"),
    ({"embedding_length": None}, "embedding_length"),
    ({"block_count": 3}, "missing: blk.2.attn_norm.weight"),
    ({"without": ("model.layers.0.mlp.up_proj.weight",)}, "missing: blk.0.ffn_up.weight"),
    ({"vocab_size": 60}, "token_embd.weight is [59, 48], expected [60, 48]"),
    ({"kind": gguf.GGMLQuantizationType.Q8_K}, "odd.weight is quantized as Q8_K"),
    ({"kind": gguf.GGMLQuantizationType.I8}, "odd.weight is quantized as I8"),
], ids=str)
def test_refused(change, expected, tmp_path):
    path = write(tmp_path / "model.gguf", **change)
    with pytest.raises(models.ModelError) as caught:
        models.load_config(path)
    assert str(path) in str(caught.value) and expected in str(caught.value)


@pytest.mark.parametrize("keep", [0, 3, 30, 300, 2000, -1])
def test_truncated(keep, tmp_path):
    path = write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(models.ModelError, match="not a whole GGUF file"):
        models.load_config(path)


def test_not_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_text("This is a letter, not a model. " * 20)
    with pytest.raises(models.ModelError, match="not a whole GGUF file"):
        models.load_config(path)
