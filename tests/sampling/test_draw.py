import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax.sampling.draw import Rule, draw, invert, truncate, uniforms

LEAST, MOST = 2.0 ** -24, 1 - 2.0 ** -24  # the ends of what `uniforms` can return


def invert_each(weights, numbers):
    """Inverts one row of weights at each number."""
    weights, numbers = jnp.asarray(weights, jnp.float32), jnp.asarray(numbers, jnp.float32)
    rows = jnp.broadcast_to(weights, (len(numbers), len(weights)))
    return np.asarray(jax.jit(invert)(rows, numbers))


@pytest.mark.parametrize("number, token", [
    (LEAST, 1), (0.0624, 1), (0.0626, 3), (0.3124, 3), (0.3126, 4), (0.8124, 4), (0.8126, 6),
    (MOST, 6)])
def test_small_distribution_by_hand(number, token):
    # Shares 1/16, 4/16, 8/16 and 3/16; the ends and the gaps have none.
    assert invert_each([0, 1, 0, 4, 8, 0, 3, 0], [number])[0] == token


def test_edges_of_blocks_by_hand():
    # 512 tokens make 256 blocks of two. Tokens 3 and 4 end one block and start another.
    weights = np.zeros(512)
    weights[[3, 4, 511]] = 1, 2, 1
    numbers = [LEAST, 0.2499, 0.2501, 0.7499, 0.7501, MOST]
    assert invert_each(weights, numbers).tolist() == [3, 3, 4, 4, 511, 511]


@pytest.mark.parametrize("size", [1, 7, 256, 257, 1000])
def test_counts_over_a_grid_are_the_probabilities(size):
    random = np.random.RandomState(size)
    weights = random.randint(0, 64, size).astype(np.float32)
    weights[random.randint(size)] = 200
    n = 1 << 14
    counts = np.bincount(invert_each(weights, (np.arange(n) + 0.5) / n), minlength=size)
    shares = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    # An interval of length s holds between n s - 1 and n s + 1 points of the grid.
    assert np.all(np.abs(counts - n * shares) <= 1 + 1e-3)
    assert not counts[weights == 0].any()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4])
def test_weights_of_any_scale_give_the_same_tokens(scale):
    weights = np.array([0.0, 3, 1, 0, 5, 7])
    numbers = (np.arange(160) + 0.5) / 160
    assert np.array_equal(invert_each(weights * scale, numbers), invert_each(weights, numbers))


def test_large_vocabulary_is_monotone_and_exact():
    size = 151_936
    random = np.random.RandomState(0)
    weights = np.exp(3 * random.standard_normal(size)).astype(np.float32)
    weights[random.rand(size) < 0.5] = 0
    numbers = np.concatenate([[LEAST], np.sort(random.rand(254)), [MOST]]).astype(np.float32)
    tokens = invert_each(weights, numbers)
    assert np.all(np.diff(tokens) >= 0)
    assert np.all(weights[tokens] > 0)
    ends = np.cumsum(weights.astype(np.float64))
    ends /= ends[-1]
    starts = ends - weights / weights.sum(dtype=np.float64)
    assert np.all(starts[tokens] <= numbers + 1e-6) and np.all(ends[tokens] >= numbers - 1e-6)
    assert tokens[0] == np.flatnonzero(weights)[0]
    assert ends[tokens[-1]] > 1 - 1e-6


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_unlikely_token_at_a_blocks_end_takes_no_rounding(seed):
    # The last of each block's 32 tokens has no share to speak of; the numbers are those next to
    # the ends of the blocks, where sums that round differently would hand it one.
    weights = np.random.RandomState(seed).rand(256, 32).astype(np.float32)
    weights[:, -1] = 1e-12
    ends = np.cumsum(weights.sum(axis=1, dtype=np.float64))
    nearest = np.round(ends[:-1, None] / ends[-1] * 2 ** 23)
    numbers = (nearest + np.arange(-8, 8) + 0.5) * 2.0 ** -23
    tokens = invert_each(weights.ravel(), numbers.ravel())
    assert not np.any(tokens % 32 == 31)


def test_uniforms_lie_inside_and_depend_on_their_own_numbers():
    key = jax.random.key(0)
    ids = jnp.arange(4096)
    numbers = np.asarray(uniforms(key, ids, ids * 0, ids * 0))
    assert numbers.dtype == np.float32
    assert numbers.min() >= LEAST and numbers.max() <= MOST
    assert len(np.unique(numbers)) > 4090
    assert abs(numbers.mean() - 0.5) < 4 * (1 / 12 / 4096) ** 0.5
    shuffled = np.random.RandomState(0).permutation(4096)
    assert np.array_equal(uniforms(key, ids[shuffled], ids * 0, ids * 0), numbers[shuffled])
    for moved in ((ids, ids * 0 + 1, ids * 0), (ids, ids * 0, ids * 0 + 1)):
        assert np.mean(np.asarray(uniforms(key, *moved)) == numbers) < 0.01
    assert np.mean(np.asarray(uniforms(jax.random.key(1), ids, ids * 0, ids * 0)) == numbers) < .01


def kept_by_sorting(weights, top_k, top_p):
    """Which tokens survive, by a sort in float64; ties with the last one kept survive."""
    weights = weights.astype(np.float64)
    if top_k is not None:
        least = np.sort(weights)[::-1][min(top_k, len(weights)) - 1]
        weights = np.where(weights >= least, weights, 0)
    if top_p is not None:
        falling = np.sort(weights)[::-1]
        enough = np.cumsum(falling) >= top_p * weights.sum()
        weights = np.where(weights >= falling[np.argmax(enough)], weights, 0)
    return weights > 0


@pytest.mark.parametrize("top_k", [None, 1, 5, 200, 1000])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.9, 0.999])
def test_truncation_equals_sorting(top_k, top_p):
    random = np.random.RandomState(3)
    weights = np.exp(2 * random.standard_normal((6, 700)))
    weights = (weights / weights.max(axis=-1, keepdims=True)).astype(np.float32)
    weights[:, ::7] = 0
    kept = np.asarray(truncate(jnp.asarray(weights), Rule(top_p=top_p, top_k=top_k)))
    for row, kept_row in zip(weights, kept):
        survives = kept_by_sorting(row, top_k, top_p)
        assert np.array_equal(kept_row, np.where(survives, row, 0))


@pytest.mark.parametrize("rule, kept", [
    (Rule(top_k=1), [1, 0, 0, 0, 0]), (Rule(top_k=2), [1, 0, 1, 1, 0]),
    (Rule(top_k=4), [1, 0, 1, 1, 1]), (Rule(top_p=0.5), [1, 0, 0, 0, 0]),
    (Rule(top_p=0.51), [1, 0, 1, 1, 0]), (Rule(top_p=0.97), [1, 0, 1, 1, 1]),
    (Rule(top_k=1, top_p=0.99), [1, 0, 0, 0, 0]),
    # Among the three most likely the first holds 8 / 15.5 = .516; beyond it the tie comes whole.
    (Rule(top_k=3, top_p=0.5), [1, 0, 0, 0, 0]), (Rule(top_k=3, top_p=0.6), [1, 0, 1, 1, 0])])
def test_truncation_by_hand_keeps_ties_together(rule, kept):
    weights = jnp.array([8, 0, 3.75, 3.75, 0.5]) / 8  # shares .5, 0, .234, .234, .031
    assert np.array_equal(np.asarray(truncate(weights, rule)) > 0, np.array(kept, bool))


def test_masked_and_underflowed_tokens_are_never_drawn():
    logits = jnp.array([-jnp.inf, 0.0, -200.0, 1.0, -jnp.inf])
    numbers = jnp.concatenate([jnp.array([LEAST, MOST]), jnp.linspace(0.001, 0.999, 500)])
    tokens, log_probs = draw(jnp.broadcast_to(logits, (502, 5)), numbers, Rule())
    assert set(np.asarray(tokens).tolist()) == {1, 3}
    expected = {1: -np.log(1 + np.e), 3: 1 - np.log(1 + np.e)}
    np.testing.assert_allclose(log_probs, [expected[int(t)] for t in tokens], atol=1e-6)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.3}, {"top_k": 2}])
def test_log_probs_are_of_the_whole_distribution(temperature, truncation):
    logits = np.random.RandomState(2).standard_normal((40, 30)).astype(np.float32) * 3
    numbers = jnp.linspace(0.01, 0.99, 40)
    tokens, log_probs = draw(jnp.asarray(logits), numbers, Rule(temperature, **truncation))
    scaled = logits.astype(np.float64) / temperature
    whole = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(log_probs, whole[np.arange(40), np.asarray(tokens)], atol=2e-6)


def test_greedy_takes_the_largest_logit_with_its_log_prob_at_temperature_one():
    tokens, log_probs = draw(jnp.log(jnp.array([[1.0, 5, 2], [4, 3, 3]])), jnp.array([0.9, 0.9]),
                             Rule(temperature=None))
    assert tokens.tolist() == [1, 0]
    np.testing.assert_allclose(log_probs, np.log([5 / 8, 4 / 10]), atol=1e-6)
