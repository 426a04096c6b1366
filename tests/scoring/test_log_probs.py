import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax.scoring import log_probs as module
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


# Vocabularies of one partial block, whole blocks, and a last block that overlaps.
@pytest.mark.parametrize("vocabulary", [5, 16, 32, 37, 47])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_equals_full_softmax_at_any_block_border(monkeypatch, vocabulary, temperature):
    monkeypatch.setattr(module, "VOCABULARY_BLOCK", 16)
    hidden, head, targets = inputs(9, 6, vocabulary)
    log_probs, entropy = token_log_probs(hidden, head, targets, temperature)
    expected, expected_entropy = oracle(hidden, head, targets, temperature)
    np.testing.assert_allclose(log_probs, expected, atol=3e-6, rtol=1e-6)
    np.testing.assert_allclose(entropy, expected_entropy, atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("vocabulary", [16, 37])
def test_gradients_equal_those_of_the_full_softmax(monkeypatch, vocabulary):
    monkeypatch.setattr(module, "VOCABULARY_BLOCK", 16)
    hidden, head, targets = inputs(9, 6, vocabulary)
    weights = np.linspace(-1.0, 2.0, 9, dtype=np.float32)

    def blocked(hidden, head):
        return jnp.sum(weights * token_log_probs(hidden, head, targets, 0.7)[0])

    def full(hidden, head):
        log_p = jax.nn.log_softmax(jnp.matmul(hidden, head.T, precision="highest") / 0.7)
        return jnp.sum(weights * log_p[jnp.arange(9), targets])

    for got, expected in zip(jax.grad(blocked, (0, 1))(hidden, head),
                             jax.grad(full, (0, 1))(hidden, head)):
        np.testing.assert_allclose(got, expected, atol=2e-6, rtol=2e-6)


def test_entropy_passes_no_gradient():
    hidden, head, targets = inputs(4, 3, 7)
    gradient = jax.grad(lambda h: token_log_probs(h, head, targets)[1].sum())(hidden)
    np.testing.assert_array_equal(gradient, np.zeros_like(hidden))


def test_huge_logits_stay_finite():
    hidden = jnp.array([[1e4], [-1e4]])
    head = jnp.array([[1.0], [-1.0], [0.0]])
    with jax.debug_nans(True):
        log_probs, entropy = token_log_probs(hidden, head, jnp.array([0, 0]))
    np.testing.assert_allclose(log_probs, [0.0, -2e4])
    np.testing.assert_allclose(entropy, [0.0, 0.0], atol=1e-6)


def test_temporaries_do_not_grow_with_the_vocabulary():
    def temporaries(vocabulary):
        shapes = (jax.ShapeDtypeStruct((64, 32), jnp.float32),
                  jax.ShapeDtypeStruct((vocabulary, 32), jnp.float32),
                  jax.ShapeDtypeStruct((64,), jnp.int32))
        compiled = jax.jit(token_log_probs).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(128 * 1024) <= 1.1 * temporaries(32 * 1024)
