import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax.training.top_tokens import VOCABULARY_BLOCK, bucket_log_probs, top_ids

# Blocks that overlap: the vocabulary is no multiple of one.
ROWS, SIZE, VOCABULARY, K = 5, 8, 2 * VOCABULARY_BLOCK + 77, 6
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(ROWS, SIZE)).astype(np.float32)
HEAD = RNG.normal(size=(VOCABULARY, SIZE)).astype(np.float32)
IDS = np.array([[0, 1, VOCABULARY_BLOCK - 1, VOCABULARY_BLOCK, VOCABULARY - 1, VOCABULARY - 80]]
               + [RNG.choice(VOCABULARY, K, replace=False) for _ in range(ROWS - 1)], np.int32)


def oracle(hidden, head, ids, temperature):
    """Log-probs of chosen and tail, and each token's probability, from whole rows in float64."""
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T / temperature
    logits -= logits.max(-1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_probs, ids, -1)
    others = log_probs.copy()
    np.put_along_axis(others, ids, -np.inf, -1)
    highest = others.max(-1, keepdims=True)
    tail = highest[:, 0] + np.log(np.exp(others - highest).sum(-1))
    return chosen, tail, np.exp(log_probs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_whole_rows(temperature):
    weights = RNG.normal(size=(ROWS, K + 1))

    def weighted(hidden, head):
        buckets = bucket_log_probs(hidden, head, IDS, temperature)
        return (jnp.sum(weights[:, :K] * buckets.chosen) + jnp.sum(weights[:, K] * buckets.tail),
                buckets)

    (_, buckets), (d_hidden, d_head) = jax.value_and_grad(
        weighted, argnums=(0, 1), has_aux=True)(HIDDEN, HEAD)
    chosen, tail, probs = oracle(HIDDEN, HEAD, IDS, temperature)
    np.testing.assert_allclose(buckets.chosen, chosen, atol=5e-6)
    np.testing.assert_allclose(buckets.tail, tail, atol=2e-6)
    # A bucket's log-prob moves with each of its tokens by that token's share of it.
    d_logits = probs / np.exp(tail)[:, None] * weights[:, K:]
    np.put_along_axis(d_logits, IDS, weights[:, :K], -1)
    d_logits = (d_logits - probs * weights.sum(-1, keepdims=True)) / temperature
    np.testing.assert_allclose(d_hidden, d_logits @ HEAD, atol=2e-5)
    np.testing.assert_allclose(d_head, d_logits.T @ HIDDEN, atol=2e-5)


def test_a_tail_too_small_for_what_is_left_of_one():
    # Two tokens have all but 1e-30 of the mass: 1 - sum would be 0, its logarithm -inf.
    logits = np.array([[40.0, 39.0, -30.0, -31.0]], np.float32)
    ids = np.array([[1, 0]], np.int32)

    def tail(logits):
        return bucket_log_probs(logits, np.eye(4, dtype=np.float32), ids).tail[0]

    value, gradient = jax.value_and_grad(tail)(logits)
    expected = np.log(np.exp(-30.0) + np.exp(-31.0)) - np.log(np.exp(40.0) + np.exp(39.0))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    share = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(
        gradient, [[-share, share - 1, share, 1 - share]], atol=1e-6)


@pytest.mark.parametrize("k", [1, K, 64])
def test_top_ids_equal_a_sort(k):
    expected = np.argsort(-(HIDDEN @ HEAD.T), -1)[:, :k]
    np.testing.assert_array_equal(top_ids(HIDDEN, HEAD, k), expected)


def test_all_tokens_but_one_are_a_whole_distribution():
    ids = np.argsort(-HIDDEN, -1)[:, :SIZE - 1].astype(np.int32)
    chosen, tail = bucket_log_probs(HIDDEN, np.eye(SIZE, dtype=np.float32), ids)
    np.testing.assert_allclose(np.exp(chosen).sum(-1) + np.exp(tail), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(top_ids(HIDDEN, np.eye(SIZE, dtype=np.float32), SIZE - 1), ids)
