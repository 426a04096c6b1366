"""Mixtures of experts against float64 in numpy, one token and one expert at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax.models import experts
from memcalib_jax.models.config import Experts
from memcalib_jax.models.expert_products import one_expert_at_a_time, sorted_by_expert

D, F, S = 6, 10, 8


def random_layer(settings, seed=0, dtype=jnp.float32):
    random = np.random.RandomState(seed)
    n = settings.count
    shapes = {"router": (D, n), "expert_gate": (n, D, F), "expert_up": (n, D, F),
              "expert_down": (n, F, D), "shared_gate": (D, S), "shared_up": (D, S),
              "shared_down": (S, D), "shared_router": (D,)}
    return {name: jnp.asarray(random.standard_normal(shape), dtype)
            for name, shape in shapes.items() if settings.shared_size or "shared" not in name}


def tokens_of(seed, *lead):
    return jnp.asarray(np.random.RandomState(seed).standard_normal((*lead, D)), jnp.float32)


def swiglu(y, gate, up, down):
    gate = y @ gate
    return (gate / (1 + np.exp(-gate)) * (y @ up)) @ down


def mixed(y, layer, settings, *, grouped):
    return experts.mixture(y, layer, settings, grouped=grouped)[0]


def oracle(y, layer, settings):
    """Returns the float64 mixture of one token."""
    logits = y @ layer["router"]
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    best = np.argsort(-shares)[:settings.per_token]
    weights = shares[best] / (shares[best].sum() if settings.normalize else 1)
    out = sum(weight * swiglu(y, *(layer[f"expert_{name}"][expert]
                                   for name in ("gate", "up", "down")))
              for weight, expert in zip(weights, best))
    if settings.shared_size:
        gate = 1 / (1 + np.exp(-(y @ layer["shared_router"])))
        out = out + gate * swiglu(y, *(layer[f"shared_{name}"] for name in ("gate", "up", "down")))
    return out


@pytest.mark.parametrize("grouped", [True, False, None])
@pytest.mark.parametrize("settings", [
    Experts(5, 2), Experts(5, 2, normalize=False), Experts(4, 4), Experts(3, 1, shared_size=S),
    Experts(7, 3, normalize=False, shared_size=S)], ids=str)
def test_values(settings, grouped):
    layer, y = random_layer(settings), tokens_of(1, 2, 9)
    ours = mixed(y, layer, settings, grouped=grouped)
    exact = {name: np.asarray(values, np.float64) for name, values in layer.items()}
    theirs = np.array([[oracle(token, exact, settings) for token in row]
                       for row in np.asarray(y, np.float64)])
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_both_forms_have_the_same_gradients():
    settings = Experts(5, 2, shared_size=S)
    layer, y, probe = random_layer(settings), tokens_of(2, 11), tokens_of(3, 11)

    @functools.partial(jax.jit, static_argnames="grouped")
    def gradients(y, layer, grouped):
        return jax.grad(lambda y, layer: jnp.vdot(
            probe, mixed(y, layer, settings, grouped=grouped)), argnums=(0, 1))(y, layer)

    sorted_form, dense = (gradients(y, layer, grouped) for grouped in (True, False))
    for ours, theirs in zip(jax.tree.leaves(sorted_form), jax.tree.leaves(dense), strict=True):
        assert np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("grouped", [True, False])
def test_no_token_is_dropped_when_all_go_to_one_expert(grouped):
    settings = Experts(4, 1)
    layer, y = random_layer(settings), jnp.abs(tokens_of(4, 40))
    layer["router"] = jnp.zeros((D, 4)).at[:, 2].set(9.0)
    expected = swiglu(np.asarray(y, np.float64), *(
        np.asarray(layer[f"expert_{name}"][2], np.float64) for name in ("gate", "up", "down")))
    np.testing.assert_allclose(mixed(y, layer, settings, grouped=grouped), expected,
                               atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("grouped", [True, False])
def test_a_token_does_not_see_the_others(grouped):
    """Neither the order of the tokens nor what else is in the batch, NaN included, matters."""
    settings = Experts(5, 2, shared_size=S)
    layer, y = random_layer(settings), tokens_of(5, 8)
    alone = np.concatenate([mixed(y[i:i + 1], layer, settings, grouped=grouped)
                            for i in range(8)])
    order = np.random.RandomState(6).permutation(8)
    together = mixed(y[order], layer, settings, grouped=grouped)
    np.testing.assert_allclose(together, alone[order], atol=1e-4)
    broken = mixed(y.at[3].set(jnp.nan), layer, settings, grouped=grouped)
    np.testing.assert_allclose(np.delete(broken, 3, axis=0), np.delete(alone, 3, axis=0), atol=1e-4)


@pytest.mark.parametrize("room", [9, 10, 30])
def test_experts_elsewhere_add_nothing_whatever_the_room(room):
    """Five tokens choose experts 4 to 9 of which 5 and 6 are here: ten choices of thirty."""
    random = np.random.RandomState(8)
    layer, tokens = random_layer(Experts(6, 2)), tokens_of(9, 5)
    matrices = tuple(layer[f"expert_{name}"][1:3] for name in ("gate", "up", "down"))
    chosen = jnp.array([random.permutation(6) + 4 for _ in range(5)])
    weights = jnp.asarray(random.rand(5, 6), jnp.float32)
    probe = tokens_of(10, 5)

    def grouped(tokens, weights, matrices):
        out = sorted_by_expert(tokens, weights, chosen - 5, matrices, room=room)
        return jnp.vdot(probe, out), out

    def dense(tokens, weights, matrices):
        out = one_expert_at_a_time(tokens, weights, chosen - 5, matrices)
        return jnp.vdot(probe, out), out

    expected = np.zeros((5, D))
    for token, weight, numbers, out in zip(np.asarray(tokens, np.float64), weights, chosen,
                                           expected):
        for number in (5, 6):
            out += float(weight[numbers == number][0]) * swiglu(
                token, *(np.asarray(x[number - 5], np.float64) for x in matrices))
    ours, out = jax.grad(grouped, argnums=(0, 1, 2), has_aux=True)(tokens, weights, matrices)
    theirs, _ = jax.grad(dense, argnums=(0, 1, 2), has_aux=True)(tokens, weights, matrices)
    np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())


def test_router_is_float32_over_bfloat16_weights():
    """Logits 1 and 1 + 2**-10 are one number in bfloat16; the router tells them apart."""
    y = jnp.ones((1, 2), jnp.float32).at[0, 1].set(2.0 ** -10)
    router = jnp.array([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]], jnp.bfloat16)
    weights, chosen = experts.route(y, router, Experts(3, 2, normalize=False))
    np.testing.assert_array_equal(chosen, [[1, 0]])
    expected = np.exp([1 + 2.0 ** -10, 1.0]) / (np.exp(1 + 2.0 ** -10) + np.e + 1)
    np.testing.assert_allclose(weights[0], expected, rtol=1e-6)


@pytest.mark.parametrize("grouped", [True, False])
def test_bfloat16_weights_give_nearly_the_same(grouped):
    settings = Experts(5, 2, shared_size=S)
    layer, y = random_layer(settings, dtype=jnp.bfloat16), tokens_of(7, 12)
    exact = mixed(y, jax.tree.map(lambda x: x.astype(jnp.float32), layer), settings,
                            grouped=grouped)
    ours = mixed(y, layer, settings, grouped=grouped)
    assert ours.dtype == jnp.float32
    assert 0 < np.abs(ours - exact).max() < 0.02 * np.abs(exact).max()


def test_load_by_hand():
    """Three tokens that count, two experts each, of four."""
    chosen = jnp.array([[[0, 1], [1, 3]], [[1, 0], [2, 3]]])
    mask = jnp.array([[True, True], [True, False]])
    np.testing.assert_array_equal(experts.load(chosen, mask, 4), [2, 3, 0, 1])
    np.testing.assert_array_equal(experts.load(chosen, jnp.zeros((2, 2), bool), 4), np.zeros(4))


@pytest.mark.parametrize("per_token", [0, 6])
def test_more_experts_than_there_are_is_refused(per_token):
    with pytest.raises(ValueError, match=rf"experts per token \({per_token}\)"):
        Experts(5, per_token)
