"""The gated delta rule by hand, against a float64 oracle, and its two forms against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax.models import delta_net
from memcalib_jax.models.config import DeltaNet
from memcalib_jax.models.delta_net import CHUNK, convolve, recurrent_step, split_heads


def by_chunk(*inputs):
    """Feeds tokens in chunks: what is read, and the states at the chunks' boundaries."""
    *tokens, state = inputs
    chunks = delta_net.solve_chunks(*(x.reshape(-1, CHUNK, *x.shape[1:]) for x in tokens))
    out, states = delta_net.run_chunks(chunks, state)
    return out.reshape(tokens[2].shape), states


recurrent, chunked, unit = (
    jax.jit(form) for form in (delta_net.recurrent, by_chunk, delta_net.unit))


def relative_error(ours, theirs):
    return float(np.max(np.abs(np.asarray(ours) - theirs)) / np.max(np.abs(theirs)))


def random_inputs(num_tokens, seed=0, rate=1.0, heads=3, key_dim=5, value_dim=4):
    """Returns what both forms take: q, k, v, log_decay, beta and a state."""
    random = np.random.RandomState(seed)
    q, k = random.standard_normal((2, num_tokens, heads, key_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = random.standard_normal((num_tokens, heads, value_dim))
    log_decay = -rate * random.gamma(1.0, size=(num_tokens, heads))
    beta = random.uniform(size=(num_tokens, heads))
    state = random.standard_normal((heads, key_dim, value_dim))
    return tuple(x.astype(np.float32) for x in (q, k, v, log_decay, beta, state))


def oracle(q, k, v, log_decay, beta, state):
    """Float64, one head at a time, by the product of rank-one reflections."""
    q, k, v, log_decay, beta, state = (
        np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta, state))
    out, last = np.zeros(v.shape), np.zeros(state.shape)
    for h in range(q.shape[1]):
        memory = state[h]
        for t in range(len(q)):
            reflection = np.eye(len(memory)) - beta[t, h] * np.outer(k[t, h], k[t, h])
            memory = (np.exp(log_decay[t, h]) * reflection @ memory
                      + beta[t, h] * np.outer(k[t, h], v[t, h]))
            out[t, h] = memory.T @ q[t, h]
        last[h] = memory
    return out, last


def test_two_tokens_by_hand():
    """One head of two key and one value dimension; a full and a half overwrite."""
    k = jnp.array([[[1.0, 0.0]], [[0.6, 0.8]]])
    q = jnp.array([[[1.0, 1.0]], [[0.0, 1.0]]])
    v = jnp.array([[[3.0]], [[1.0]]])
    beta, decay = jnp.array([[1.0], [0.5]]), jnp.log(jnp.array([[0.25], [0.5]]))
    state = jnp.array([[[8.0], [4.0]]])
    # Decayed: (2, 1); k reads 2; corrected by 3 - 2: (3, 1). Decayed: (1.5, .5); k reads 1.3;
    # corrected by half of 1 - 1.3 along k: (1.5 - .09, .5 - .12).
    out, last = recurrent(q, k, v, decay, beta, state)
    np.testing.assert_allclose(out[:, 0, 0], [4.0, 0.38], rtol=1e-6)
    np.testing.assert_allclose(last[0, :, 0], [1.41, 0.38], rtol=1e-6)


@pytest.mark.parametrize("rate", [0.01, 1.0, 20.0])
def test_both_forms_equal_the_oracle(rate):
    inputs = random_inputs(2 * CHUNK, seed=1, rate=rate)
    out, last = oracle(*inputs)
    ours, state = recurrent(*inputs)
    assert relative_error(ours, out) < 1e-5 and relative_error(state, last) < 1e-5
    ours, states = chunked(*inputs)
    assert relative_error(ours, out) < 1e-5 and relative_error(states[-1], last) < 1e-5


def weighted_sum(form):
    """A scalar of everything that a form returns, the last state included."""
    def scalar(*inputs):
        out, last = form(*inputs)
        weights = jnp.arange(1.0, out.size + 1).reshape(out.shape) / out.size
        return jnp.sum(jnp.sin(out) * weights) + jnp.sum(jnp.cos(last))
    return scalar


@jax.jit
def both_gradients(*inputs):
    def last_of_chunked(*inputs):
        out, states = chunked(*inputs)
        return out, states[-1]
    return tuple(jax.grad(weighted_sum(form), argnums=range(6))(*inputs)
                 for form in (recurrent, last_of_chunked))


@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_gradients_of_both_forms_are_equal(rate):
    by_token, by_chunk = both_gradients(*random_inputs(2 * CHUNK, seed=2, rate=rate))
    for ours, theirs in zip(by_chunk, by_token):
        assert relative_error(ours, theirs) < 1e-5


def test_gradients_survive_complete_forgetting():
    """Decays whose exponential is 0 in float32, and keys and queries of length 0."""
    _, _, v, log_decay, beta, state = random_inputs(2 * CHUNK, seed=3)
    zeros = np.asarray(unit(np.zeros((2 * CHUNK, 3, 5), np.float32)))
    inputs = (zeros, zeros, v, log_decay - 1000.0, beta, state)
    with jax.debug_nans(True):
        gradients = both_gradients(*inputs)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(gradients))


def test_states_at_boundaries_are_those_of_prefixes():
    inputs = random_inputs(2 * CHUNK, seed=4)
    states = chunked(*inputs)[1]
    np.testing.assert_array_equal(states[0], inputs[-1])
    for i in (1, 2):
        prefix = [x[:i * CHUNK] for x in inputs[:-1]]
        assert relative_error(states[i], oracle(*prefix, inputs[-1])[1]) < 1e-5


def test_a_state_goes_on_where_it_was_left():
    inputs = random_inputs(2 * CHUNK, seed=5)
    whole, states = chunked(*inputs)
    first, between = chunked(*(x[:CHUNK] for x in inputs[:-1]), inputs[-1])
    second, last = chunked(*(x[CHUNK:] for x in inputs[:-1]), between[-1])
    assert relative_error(np.concatenate([first, second]), whole) < 1e-6
    assert relative_error(last[-1], states[-1]) < 1e-6


def test_a_token_without_beta_and_decay_leaves_no_trace():
    q, k, v, log_decay, beta, state = random_inputs(2 * CHUNK, seed=6)
    log_decay[37:] = beta[37:] = 0.0
    states = chunked(q, k, v, log_decay, beta, state)[1]
    short = oracle(*(x[:37] for x in (q, k, v, log_decay, beta)), state)
    assert relative_error(states[-1], short[1]) < 1e-5


def test_a_full_write_is_read_back():
    """After a write with beta 1, a unit key reads its value, whatever was there."""
    _, k, v, log_decay, _, state = random_inputs(1, seed=7)
    _, out = recurrent_step(state, k[0], k[0], v[0], log_decay[0], np.ones(3))
    np.testing.assert_allclose(out, v[0], rtol=1e-5)


def test_convolution_by_hand():
    """Two channels, three taps, one token of context that is absent and one that is there."""
    kernel = jnp.array([[1.0, 0.0], [2.0, 0.0], [3.0, 1.0]])
    inputs = jnp.array([[0.0, 0.0], [1.0, 5.0], [2.0, -1.0], [-1.0, 2.0]])
    before = np.array([[0 + 2 + 6, -1], [1 + 4 - 3, 2]], np.float64)
    np.testing.assert_allclose(convolve(inputs, kernel), before / (1 + np.exp(-before)), rtol=1e-6)


def test_heads_are_cut_in_order_and_keys_serve_neighbours():
    """Two key heads of 2, four value heads of 1: channels q0 q1 k0 k1 v0 v1 v2 v3."""
    mixed = jnp.array([3.0, 4.0, 0.0, 2.0, 5.0, 12.0, 1.0, 0.0, 7.0, 8.0, 9.0, 10.0])
    q, k, v = split_heads(mixed, DeltaNet(("delta", "attention"), 2, 4, 2, 1, conv_size=4))
    q0, q1, k0, k1 = np.array([.6, .8]), np.array([0, 1]), np.array([5, 12]) / 13, np.array([1, 0])
    np.testing.assert_allclose(q * 2 ** 0.5, [q0, q0, q1, q1], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(k, [k0, k0, k1, k1], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(v[:, 0], [7.0, 8.0, 9.0, 10.0])
