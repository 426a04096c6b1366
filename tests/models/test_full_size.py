"""The papers' models in full size, without their weights: shapes alone.

Each config is the published config.json, as far as it says anything about the text model's shape.
Parameters are counted by a formula of its own and compared with the count that is published.
"""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.paper_models import (
    MINISTRAL3_8B, QWEN25_3B, QWEN25_7B, QWEN3_8B, QWEN35_35B)
from memcalib_jax import models
from memcalib_jax.models.weights.config_json import read_config
from memcalib_jax.models.weights.families import (
    PARAMETERS, flat_shapes, tensor_names)


def dense_count(d, f, layers, q, kv, vocabulary, matrices, *, bias=False, head_norm=0):
    """Counts a dense model: q and kv are the widths of all heads together."""
    attention = 2 * d * q + 2 * d * kv + bias * (q + 2 * kv) + 2 * head_norm
    return layers * (attention + 3 * d * f + 2 * d) + d + matrices * vocabulary * d


def hybrid_count(d=2048, vocabulary=248320, experts=256, f=512):
    """Counts Qwen3.5-35B-A3B, 30 delta net layers and 10 of attention."""
    q, kv, head = 16 * 256, 2 * 256, 256
    attention = d * 2 * q + 2 * d * kv + q * d + 2 * head  # the query's gate beside it
    key, value, heads = 16 * 128, 32 * 128, 32
    mixed = 2 * key + value
    delta = d * mixed + 4 * mixed + 2 * d * value + 2 * d * heads + 2 * heads + 128
    mlp = d * experts + 3 * d * f * experts + 3 * d * f + d
    return 10 * attention + 30 * delta + 40 * (mlp + 2 * d) + d + 2 * vocabulary * d


# The config, how many parameters it has, and how the count is published: a whole number, or
# billions as they are rounded there.
MODELS = {
    "Qwen3-8B": (
        QWEN3_8B, dense_count(4096, 12288, 36, 32 * 128, 8 * 128, 151936, 2, head_norm=128),
        8_190_735_360),
    "Qwen2.5-3B-Instruct": (
        QWEN25_3B, dense_count(2048, 11008, 36, 16 * 128, 2 * 128, 151936, 1, bias=True),
        3_085_938_688),
    "Qwen2.5-7B-Instruct": (
        QWEN25_7B, dense_count(3584, 18944, 28, 28 * 128, 4 * 128, 152064, 2, bias=True),
        7_615_616_512),
    # "8.4B language model" on the model's page.
    "Ministral-3-8B-Instruct-2512": (
        MINISTRAL3_8B, dense_count(4096, 14336, 34, 32 * 128, 8 * 128, 131072, 2), "8.4B"),
    "Qwen3.5-35B-A3B": (QWEN35_35B, hybrid_count(), "35B"),
}
# Stored tensors; of an expert there are three.
TENSORS = {
    "Qwen3-8B": 36 * 11 + 3, "Qwen2.5-3B-Instruct": 36 * 12 + 2, "Qwen2.5-7B-Instruct": 28 * 12 + 3,
    "Ministral-3-8B-Instruct-2512": 34 * 9 + 3,
    "Qwen3.5-35B-A3B": 30 * 9 + 10 * 6 + 40 * (7 + 256 * 3) + 3}


def config_of(name):
    return read_config(MODELS[name][0], Path("config.json"))


def abstract_params(config, dtype):
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype),
                        config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize("name", MODELS)
def test_parameter_count(name):
    _, by_formula, published = MODELS[name]
    count = sum(math.prod(shape) for shape in flat_shapes(config_of(name)).values())
    assert count == by_formula
    if isinstance(published, int):
        assert count == published
    else:
        # Cut off after the digits that are shown, as 8.49 is to 8.4, or rounded to them.
        shown = float(published.removesuffix("B"))
        step = 0.1 if "." in published else 1
        assert shown - step / 2 <= count / 1e9 < shown + step


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype, size", [(jnp.float32, 4), (jnp.bfloat16, 2)], ids=["f32", "bf16"])
def test_bytes(name, dtype, size):
    params = jax.tree.leaves(abstract_params(config_of(name), dtype))
    assert sum(x.size * x.dtype.itemsize for x in params) == size * MODELS[name][1]


@pytest.mark.parametrize("name", MODELS)
def test_tensors(name):
    """Every stored tensor has one name and one shape, and together they hold every parameter."""
    config, stored = config_of(name), {}
    for path, shape in flat_shapes(config).items():
        placement = PARAMETERS[path]
        for tensor in tensor_names(path, config, "hugging_face"):
            assert tensor not in stored
            stored[tensor] = placement.stored_shape(shape[placement.stacked_axes:])
    assert sum(math.prod(shape) for shape in stored.values()) == MODELS[name][1]
    assert len(stored) == TENSORS[name]
    d, vocabulary = config.hidden_size, config.vocab_size
    assert stored["model.embed_tokens.weight"] == (vocabulary, d)
    assert stored["model.norm.weight"] == (d,)
    assert ("lm_head.weight" in stored) == (not config.tie_embeddings)
    last = f"model.layers.{config.num_layers - 1}."
    assert stored[last + "self_attn.o_proj.weight"] == (d, config.num_heads * config.head_dim)
    assert stored[last + "self_attn.k_proj.weight"] == (config.num_kv_heads * config.head_dim, d)
    assert (last + "self_attn.k_proj.bias" in stored) == name.startswith("Qwen2.5")
    assert (last + "self_attn.q_norm.weight" in stored) == name.startswith("Qwen3")
    assert f"model.layers.{config.num_layers}.input_layernorm.weight" not in stored


@pytest.mark.parametrize("name", MODELS)
def test_forward_shapes(name):
    config = config_of(name)
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    logits = jax.eval_shape(lambda params, *rows: models.logits(params, config, *rows),
                            abstract_params(config, jnp.bfloat16), tokens, lengths)
    assert (logits.shape, logits.dtype) == ((2, 64, config.vocab_size), jnp.float32)
