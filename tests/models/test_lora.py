import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from memcalib_jax.models import ModelConfig, layers
from memcalib_jax.models.lora import (
    LoraConfig, adapter_shapes, init_adapter, merge, target_paths, with_adapter)
from memcalib_jax.models.packed import logits
from memcalib_jax.models.weights import families

CONFIG = ModelConfig("qwen3", 31, 24, 40, 3, 4, 2, 8, qk_norm=True)
LORA = LoraConfig(rank=3, alpha=6.0, targets=("q", "o", "down"))
ALL = ("q", "k", "v", "o", "gate", "up", "down")


def random_tree(shapes, seed, scale=0.4):
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    rng = np.random.default_rng(seed)
    return tree.unflatten([jnp.asarray(rng.normal(size=s) * scale, jnp.float32) for s in leaves])


PARAMS = random_tree(CONFIG.parameter_shapes(), 0)
TOKENS = np.random.default_rng(1).integers(0, 31, (2, 9))
LENGTHS = np.array([9, 6])


def test_shapes_are_input_axes_rank_output_axes():
    assert adapter_shapes(CONFIG, LORA) == {"layers": {
        "q_lora_a": (3, 24, 3), "q_lora_b": (3, 3, 4, 8),
        "o_lora_a": (3, 4, 8, 3), "o_lora_b": (3, 3, 24),
        "down_lora_a": (3, 40, 3), "down_lora_b": (3, 3, 24)}}


@pytest.mark.parametrize("written, meant", [
    (("q",), ["q"]), (("q_proj", "k_proj"), ["q", "k"]), (("down", "q", "q_proj"), ["q", "down"]),
    (("all-linear",), ["q", "k", "v", "o", "gate", "up", "down"]),
    (("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), list(ALL))])
def test_targets_by_either_name(written, meant):
    assert sorted(target_paths(CONFIG, written)) == sorted(f"layers/{name}" for name in meant)


@pytest.mark.parametrize("target", ["embed", "embed_tokens", "q_norm", "lm_head", "qkv", ""])
def test_what_is_no_projection_is_refused_by_name(target):
    with pytest.raises(ValueError, match=f"'{target}' is no projection .* down, gate, k, o, q"):
        target_paths(CONFIG, ("q", target))


def test_no_targets_are_refused():
    with pytest.raises(ValueError, match="at least one target"):
        target_paths(CONFIG, ())


@pytest.mark.parametrize("change, word", [({"rank": 0}, "rank"), ({"alpha": 0.0}, "alpha")])
def test_a_wrong_size_is_refused(change, word):
    with pytest.raises(ValueError, match=word):
        dataclasses.replace(LORA, **change)


def test_a_is_uniform_within_the_bound_and_b_is_zero():
    config = dataclasses.replace(CONFIG, hidden_size=400)
    adapter = init_adapter(jax.random.key(0), config, LoraConfig(16, 1.0, ("q", "o")))["layers"]
    for name, inputs in (("q_lora_a", 400), ("o_lora_a", 32)):
        values, bound = np.asarray(adapter[name]), inputs ** -0.5
        assert np.abs(values).max() <= bound and np.abs(values).max() > 0.98 * bound
        np.testing.assert_allclose(values.std(), bound / 3 ** 0.5, rtol=0.05)
        assert not np.array_equal(values[0], values[1])
    assert not np.any(adapter["q_lora_b"]) and not np.any(adapter["o_lora_b"])
    assert {value.dtype for value in adapter.values()} == {jnp.dtype("float32")}


def test_a_projection_starts_the_same_whatever_else_is_adapted():
    key = jax.random.key(3)
    alone = init_adapter(key, CONFIG, LoraConfig(2, 1.0, ("k",)))["layers"]
    among = init_adapter(key, CONFIG, LoraConfig(2, 1.0, ALL))["layers"]
    np.testing.assert_array_equal(alone["k_lora_a"], among["k_lora_a"])
    assert not np.array_equal(among["k_lora_a"], among["v_lora_a"])


def test_a_new_adapter_changes_no_bit_of_a_projection():
    lora = LoraConfig(4, 8.0, ("q",))
    both = with_adapter(PARAMS, init_adapter(jax.random.key(0), CONFIG, lora), lora)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(5, 24)), jnp.float32)
    with_it, without = (layers.project(x, jax.tree.map(lambda v: v[0], params["layers"]), "q")
                        for params in (both, PARAMS))
    np.testing.assert_array_equal(with_it, without)


def test_the_base_is_shared_not_copied_and_stays():
    adapter = random_tree(adapter_shapes(CONFIG, LORA), 2)
    before = sorted(flatten_dict(PARAMS))
    both = flatten_dict(with_adapter(PARAMS, adapter, LORA))
    assert all(both[path] is value for path, value in flatten_dict(PARAMS).items())
    assert sorted(flatten_dict(PARAMS)) == before


@pytest.mark.parametrize("name, input_axes", [("q", 1), ("o", 2), ("down", 1)])
def test_projection_by_hand(name, input_axes):
    adapter = random_tree(adapter_shapes(CONFIG, LORA), 2)
    layer = jax.tree.map(lambda x: x[1], with_adapter(PARAMS, adapter, LORA)["layers"])
    w, a, b = (np.asarray(tree["layers"][key][1], np.float64) for tree, key in
               ((PARAMS, name), (adapter, f"{name}_lora_a"), (adapter, f"{name}_lora_b")))
    inputs, outputs = int(np.prod(w.shape[:input_axes])), w.shape[input_axes:]
    x = np.random.default_rng(4).normal(size=(5, inputs))
    w, a, b = w.reshape(inputs, -1), a.reshape(inputs, -1), b.reshape(3, -1)
    expected = np.stack([row @ w + 2.0 * ((row @ a) @ b) for row in x])  # alpha / rank = 6 / 3
    ours = layers.project(jnp.asarray(x, jnp.float32).reshape(5, *layer[name].shape[:input_axes]),
                          layer, name, input_axes=input_axes)
    np.testing.assert_allclose(ours, expected.reshape(5, *outputs), atol=2e-5)


def test_merged_weights_give_the_same_logits():
    lora = LoraConfig(3, 2.0)
    adapter = random_tree(adapter_shapes(CONFIG, lora), 5)
    beside = logits(with_adapter(PARAMS, adapter, lora), CONFIG, TOKENS, LENGTHS)
    merged = merge(PARAMS, adapter, lora)
    assert flatten_dict(merged).keys() == flatten_dict(PARAMS).keys()
    within = np.asarray(logits(merged, CONFIG, TOKENS, LENGTHS))
    base = np.asarray(logits(PARAMS, CONFIG, TOKENS, LENGTHS))
    valid = np.arange(9) < LENGTHS[:, None]
    scale = np.abs(within[valid]).max()
    assert np.abs((beside - within)[valid]).max() < 1e-4 * scale
    assert np.abs((base - within)[valid]).max() > 0.1 * scale


def test_merging_keeps_each_weights_dtype():
    adapter = random_tree(adapter_shapes(CONFIG, LORA), 2)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    merged = merge(half, adapter, LORA)
    assert {x.dtype for x in jax.tree.leaves(merged)} == {jnp.dtype("bfloat16")}
    w = np.asarray(half["layers"]["q"], np.float64)
    product = np.einsum("lir,lrhd->lihd", np.asarray(adapter["layers"]["q_lora_a"], np.float64),
                        np.asarray(adapter["layers"]["q_lora_b"], np.float64))
    np.testing.assert_allclose(np.asarray(merged["layers"]["q"], np.float64), w + 2.0 * product,
                               rtol=2 ** -8, atol=1e-6)


@pytest.mark.parametrize("name, input_axes", [("q", 1), ("o", 2)])
def test_gradient_is_that_of_merged_weights_chained_by_hand(name, input_axes):
    adapter = random_tree(adapter_shapes(CONFIG, LORA), 6)
    frozen = jax.tree.map(lambda x: x[2], PARAMS["layers"])
    rng = np.random.default_rng(7)
    x = rng.normal(size=(5, *frozen[name].shape[:input_axes]))
    c = rng.normal(size=(5, *frozen[name].shape[input_axes:]))

    def loss(a, b):
        both = with_adapter({name: frozen[name]}, {f"{name}_lora_a": a, f"{name}_lora_b": b}, LORA)
        y = layers.project(jnp.asarray(x, jnp.float32), both, name, input_axes=input_axes)
        return jnp.sum(jnp.asarray(c, jnp.float32) * jnp.square(y))

    a, b = (adapter["layers"][f"{name}_lora_{letter}"][2] for letter in "ab")
    ours = jax.grad(loss, argnums=(0, 1))(a, b)
    # With W' = W + s A B: dL/dA = s dL/dW' B^T and dL/dB = s A^T dL/dW', s = alpha / rank = 2.
    w, left, right = (np.asarray(m, np.float64).reshape(rows, -1) for m, rows in
                      ((frozen[name], x[0].size), (a, x[0].size), (b, 3)))
    x, c = x.reshape(5, -1), c.reshape(5, -1)
    to_merged = x.T @ (2 * c * (x @ (w + 2 * left @ right)))
    expected = (2 * to_merged @ right.T).reshape(a.shape), (2 * left.T @ to_merged).reshape(b.shape)
    for got, wanted in zip(ours, expected):
        assert np.abs(got - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["expert_gate", "router"])
def test_routers_and_stacked_experts_are_refused_by_name(name, monkeypatch):
    shapes = families.flat_shapes(CONFIG) | {f"layers/{name}": (3, 24, 4)}
    placement = families.Placement(families.Names(f"model.layers.{{}}.mlp.{name}.weight", ""), 1)
    monkeypatch.setattr("memcalib_jax.models.lora.flat_shapes", lambda config: shapes)
    monkeypatch.setitem(families.PARAMETERS, f"layers/{name}", placement)
    with pytest.raises(ValueError, match=f"'{name}' is a router or a stack of experts"):
        target_paths(CONFIG, (name,))
    assert f"layers/{name}" not in target_paths(CONFIG, ("all-linear",))
