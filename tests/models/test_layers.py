"""The parts of a layer that only some families have, against float64 in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_params

from memcalib_jax.models import ModelConfig, layers, logits
from memcalib_jax.models.rope import Rope

CONFIG = ModelConfig(
    "qwen3_5", vocab_size=31, hidden_size=12, intermediate_size=20, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, rope=Rope(100.0, 0.5), norm_eps=1e-6, qk_norm=True,
    attention_gate=True, zero_centred_norms=True, tie_embeddings=False)


def normed(x, scale, *, eps=1e-6):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (1 + scale)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def oracle_logits(params, tokens):
    """Returns the float64 logits of one row of `CONFIG`, one token and one head at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = params["embed"][tokens]
    for number in range(CONFIG.num_layers):
        layer = {name: values[number] for name, values in params["layers"].items()}
        y, mixed = normed(x, layer["attention_norm"]), np.zeros((len(tokens), 4, 8))
        for head in range(4):
            both = y @ layer["q"][:, head]
            q, gate = normed(both[:, :8], layer["q_norm"]), sigmoid(both[:, 8:])
            k = normed(y @ layer["k"][:, head // 2], layer["k_norm"])
            v = y @ layer["v"][:, head // 2]
            for t in range(len(tokens)):
                scores = [turn(q[t], t) @ turn(k[s], s) / np.sqrt(8) for s in range(t + 1)]
                weights = np.exp(scores - np.max(scores))
                mixed[t, head] = gate[t] * (weights @ v[:t + 1] / weights.sum())
        x = x + np.einsum("thd,hde->te", mixed, layer["o"])
        y = normed(x, layer["mlp_norm"])
        gate = y @ layer["gate"]
        x = x + (gate * sigmoid(gate) * (y @ layer["up"])) @ layer["down"]
    return normed(x, params["final_norm"]) @ params["head"].T


def turn(head, position):
    """Rotates dimensions (0, 2) and (1, 3) of 8 by the position's angles at theta 100."""
    out = head.copy()
    for i, angle in enumerate((position, position / 10)):
        a, b = head[i], head[i + 2]
        out[i] = a * np.cos(angle) - b * np.sin(angle)
        out[i + 2] = b * np.cos(angle) + a * np.sin(angle)
    return out


def test_gated_attention_with_zero_centred_norms_and_partial_rotation():
    params, tokens = random_params(CONFIG), np.array([3, 30, 0, 7, 7, 12, 5])
    ours = logits(params, CONFIG, jnp.asarray(tokens)[None], jnp.array([len(tokens)]))[0]
    theirs = oracle_logits(params, tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_norm_by_hand():
    """Mean square of (3, 4) is 12.5; a scale of 0.5 counted from 1 is 1.5."""
    x, scale = jnp.array([3.0, 4.0]), jnp.array([0.5, -1.0])
    expected = np.array([3.0, 4.0]) / np.sqrt(12.5 + 1e-6)
    np.testing.assert_allclose(layers.norm(x, scale, CONFIG), expected * [1.5, 0.0], rtol=1e-6)
    plain = dataclasses.replace(CONFIG, zero_centred_norms=False)
    np.testing.assert_allclose(layers.norm(x, scale, plain), expected * [0.5, -1.0], rtol=1e-6)


def test_zero_centred_scale_keeps_what_bfloat16_would_lose():
    """1 + 2**-9 is no bfloat16: the one is added in float32."""
    scale = jnp.full(4, 2.0 ** -9, jnp.bfloat16)
    np.testing.assert_allclose(layers.norm(jnp.ones(4), scale, CONFIG), 1 + 2.0 ** -9, rtol=1e-6)


def test_gates_lie_behind_each_head_s_queries():
    """An open gate (large) is no gate; a shut one (very negative) leaves the stream as it is."""
    layer = jax.tree.map(lambda x: x[0], random_params(CONFIG)["layers"])
    x, positions = jnp.ones((3, 12)), jnp.arange(3)
    q, k, v, gate = layers.project_qkv(x, positions, layer, CONFIG)
    y = layers.norm(x, layer["attention_norm"], CONFIG)
    np.testing.assert_allclose(gate, np.einsum("td,dhe->the", y, layer["q"][..., 8:]), atol=1e-5)
    assert q.shape == gate.shape == (3, 4, 8) and k.shape == v.shape == (3, 2, 8)
    mixed = jnp.asarray(np.random.RandomState(1).standard_normal((3, 4, 8)), jnp.float32)
    ungated = layers.attention_output(x, mixed, None, layer)
    np.testing.assert_allclose(layers.attention_output(x, mixed, jnp.full(mixed.shape, 40.0),
                                                       layer), ungated, rtol=1e-6)
    np.testing.assert_array_equal(
        layers.attention_output(x, mixed, jnp.full(mixed.shape, -200.0), layer), x)


@pytest.mark.parametrize("changes, message", [
    ({"rope": Rope(partial_rotary_factor=0.4)}, "rotated part (3) of head_dim (8)"),
    ({"rope": Rope(partial_rotary_factor=0.1)}, "rotated part (0) of head_dim (8)"),
    ({"head_dim": 7, "rope": Rope()}, "rotated part (7) of head_dim (7)"),
    ({"num_kv_heads": 3}, "multiple of num_kv_heads (3)"),
    ({"family": "gpt"}, "unknown model family 'gpt'")])
def test_shapes_that_cannot_be(changes, message):
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(CONFIG, **changes)
    assert message in str(caught.value)
