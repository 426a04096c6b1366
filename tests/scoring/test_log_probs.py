import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax.scoring import log_probs as blocks
from memcalib_jax.scoring.log_probs import token_log_probs


def oracle(hidden, head, targets, temperature):
    """Log-probs and entropies by a full float64 softmax."""
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T / temperature
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_p[np.arange(len(targets)), targets], -(np.exp(log_p) * log_p).sum(-1)


def inputs(rows, width, vocabulary, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(rows, width)).astype(np.float32),
            rng.normal(size=(vocabulary, width)).astype(np.float32),
            rng.integers(0, vocabulary, rows))


def test_hand_worked():
    # Logits are (0, log 3): probabilities 1/4 and 3/4.
    hidden = jnp.array([[1.0], [1.0]])
    head = jnp.array([[0.0], [np.log(3.0)]])
    log_probs, entropy = token_log_probs(hidden, head, jnp.array([0, 1]))
    np.testing.assert_allclose(log_probs, np.log([0.25, 0.75]), rtol=1e-6)
    expected = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    np.testing.assert_allclose(entropy, [expected, expected], rtol=1e-6)


# Vocabularies of one partial block, whole blocks, and a shorter last one.
@pytest.mark.parametrize("vocabulary", [5, 16, 32, 37, 47])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_equals_full_softmax_at_any_border(monkeypatch, vocabulary, temperature):
    monkeypatch.setattr(blocks, "VOCABULARY_BLOCK", 16)
    monkeypatch.setattr(blocks, "ROW_TILE", 4)
    hidden, head, targets = inputs(9, 6, vocabulary)
    log_probs, entropy = token_log_probs(hidden, head, targets, temperature)
    expected, expected_entropy = oracle(hidden, head, targets, temperature)
    np.testing.assert_allclose(log_probs, expected, atol=3e-6, rtol=1e-6)
    np.testing.assert_allclose(entropy, expected_entropy, atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("vocabulary", [16, 37])
@pytest.mark.parametrize("entropy_weight", [0.0, 1.5])
def test_gradients_equal_those_of_the_full_softmax(monkeypatch, vocabulary, entropy_weight):
    monkeypatch.setattr(blocks, "VOCABULARY_BLOCK", 16)
    monkeypatch.setattr(blocks, "ROW_TILE", 4)
    hidden, head, targets = inputs(9, 6, vocabulary)
    weights = np.linspace(-1.0, 2.0, 9, dtype=np.float32)

    def blocked(hidden, head):
        log_probs, entropy = token_log_probs(hidden, head, targets, 0.7)
        return jnp.sum(weights * log_probs) + entropy_weight * jnp.sum(weights**2 * entropy)

    def full(hidden, head):
        log_p = jax.nn.log_softmax(jnp.matmul(hidden, head.T, precision="highest") / 0.7)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
        return jnp.sum(weights * log_p[jnp.arange(9), targets]) + entropy_weight * jnp.sum(
            weights**2 * entropy)

    for got, expected in zip(jax.grad(blocked, (0, 1))(hidden, head),
                             jax.grad(full, (0, 1))(hidden, head)):
        np.testing.assert_allclose(got, expected, atol=2e-5 if entropy_weight else 2e-6, rtol=2e-6)


@pytest.mark.parametrize("count", [0, 1, 4, 6, 9])
def test_rows_beyond_the_count_have_no_influence(monkeypatch, count):
    monkeypatch.setattr(blocks, "ROW_TILE", 4)
    hidden, head, targets = inputs(9, 6, 37)

    def run(hidden, head, count):
        values, entropy = token_log_probs(hidden, head, targets, count=count)
        return jnp.sum(jnp.where(jnp.arange(9) < count, values, 0.0)), (values, entropy)

    gradients, (values, entropy) = jax.jit(jax.grad(run, (0, 1), has_aux=True))(
        hidden, head, jnp.asarray(count))

    def all_rows(hidden, head):
        values, entropy = token_log_probs(hidden, head, targets)
        return jnp.sum(values[:count]), (values, entropy)

    expected, (whole, whole_entropy) = jax.grad(all_rows, (0, 1), has_aux=True)(hidden, head)
    np.testing.assert_allclose(values[:count], whole[:count], atol=2e-6)
    np.testing.assert_allclose(entropy[:count], whole_entropy[:count], atol=2e-6)
    assert np.all(np.isfinite(values)) and np.all(np.isfinite(entropy))
    reached = -(-count // 4) * 4
    np.testing.assert_array_equal(gradients[0][reached:], 0)
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-6)


def test_entropy_gradient_by_hand():
    # Logits (0, x): p = sigmoid(x), H' = -x p (1 - p); at x = log 3: -log 3 * 3 / 16.
    head = jnp.array([[0.0], [1.0]])
    gradient = jax.grad(lambda h: token_log_probs(h, head, jnp.array([0]))[1].sum())(
        jnp.array([[np.log(3.0)]]))
    np.testing.assert_allclose(gradient, [[-np.log(3.0) * 3 / 16]], rtol=1e-5)


def test_huge_logits_stay_finite():
    hidden = jnp.array([[1e4], [-1e4]])
    head = jnp.array([[1.0], [-1.0], [0.0]])
    with jax.debug_nans(True):
        log_probs, entropy = token_log_probs(hidden, head, jnp.array([0, 0]))
    np.testing.assert_allclose(log_probs, [0.0, -2e4])
    np.testing.assert_allclose(entropy, [0.0, 0.0], atol=1e-6)


def loss(hidden, head, targets):
    return token_log_probs(hidden, head, targets)[0].sum()


@pytest.mark.parametrize("function", [token_log_probs, jax.grad(loss), jax.grad(loss, (0, 1))])
def test_temporaries_do_not_grow_with_the_vocabulary(function):
    def temporaries(vocabulary):
        shapes = (jax.ShapeDtypeStruct((512, 64), jnp.float32),
                  jax.ShapeDtypeStruct((vocabulary, 64), jnp.float32),
                  jax.ShapeDtypeStruct((512,), jnp.int32))
        compiled = jax.jit(function).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small = temporaries(32 * 1024)
    assert small < 32 * 2 ** 20  # half of the logits
    # The head's own gradient is a result, not a temporary.
    assert temporaries(256 * 1024) <= 1.1 * small


def test_a_vocabulary_spread_over_devices():
    program = pathlib.Path(__file__).with_name("sharded_vocabulary.py")
    result = subprocess.run([sys.executable, str(program)],
                            env={**os.environ, "PYTHONPATH": str(program.parents[2])},
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == "sharded equals whole"
