import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import credit_oracle
import memcalib_jax
from memcalib_jax import init_thresholds
from memcalib_jax.credit.float_order import floats_of, ordered_keys
from memcalib_jax.credit.thresholds import _quantile_rank

update_thresholds = jax.jit(
    memcalib_jax.update_thresholds, static_argnames=("quantile", "axis_name", "min_count")
)


def pool(scores):
    """Put one pool into every channel: scores and mask [C, T]."""
    scores = np.broadcast_to(np.float32(scores), (9, len(scores)))
    return scores, np.ones(scores.shape, bool)


def quantile_of(scores, quantile):
    """Read the quantile itself off an update with decay 0 and no floor."""
    out = update_thresholds(
        jnp.zeros(9), *pool(scores), quantile=quantile, floor=-1e30, decay=0.0, min_count=1
    )
    np.testing.assert_array_equal(out, out[0])
    return out[0]


def test_initial_thresholds():
    np.testing.assert_array_equal(init_thresholds(), np.full(9, 0.02, np.float32))
    np.testing.assert_array_equal(init_thresholds(initial=0.01), np.full(9, 0.01, np.float32))


@pytest.mark.parametrize(
    "scores, quantile, expected",
    [
        ([1.0, 2.0, 3.0, 4.0], 0.75, 3.25),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.5),
        ([5.0], 0.75, 5.0),
        ([1.0, 1.0, 1.0, 9.0], 0.75, 3.0),
        ([-3.0, -1.0, -2.0], 0.25, -2.5),
        ([-1.0, 1.0], 0.5, 0.0),
        ([3.0, 1.0, 2.0], 1.0, 3.0),
        ([3.0, 1.0, 2.0], 0.0, 1.0),
        ([-0.0, 0.0, 0.0], 0.5, 0.0),
    ],
)
def test_quantiles_worked_by_hand(scores, quantile, expected):
    assert quantile_of(scores, quantile) == expected


@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.5, 0.7, 0.75, 0.999, 1.0])
def test_quantiles_equal_numpys(quantile):
    rng = np.random.default_rng(0)
    for draw in (
        rng.normal(0, 1, 1001),
        rng.integers(-3, 4, 1001),
        np.clip(rng.normal(0, 3, 1001), -3, 3),
        rng.normal(0, 1, 1001) * 10.0 ** rng.integers(-30, 30, 1001),
        np.full(1001, 0.1),
    ):
        scores = draw.astype(np.float32)
        exact = np.quantile(scores.astype(np.float64), quantile)
        np.testing.assert_allclose(quantile_of(scores, quantile), exact, rtol=2.4e-7, atol=1e-30)


def test_large_pools_keep_the_fraction_of_the_rank():
    # 0.7 * 1,000,002 = 700,001.4, whose fraction a float32 cannot hold.
    count = jnp.full(9, 1_000_003)
    for quantile in (0.7, jnp.float32(0.75)):
        whole, fraction = _quantile_rank(quantile, count)
        rank = float(quantile) * 1_000_002
        assert int(whole[0]) == int(rank)
        np.testing.assert_allclose(fraction, rank - int(rank), atol=5e-4)


def test_keys_are_in_the_order_of_floats():
    values = np.float32([-np.inf, -3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.5, 3e38, np.inf])
    keys = np.asarray(ordered_keys(values))
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    np.testing.assert_array_equal(floats_of(keys), values)


def test_an_update_worked_by_hand():
    # Quantile 3.25: 0.9 * 0.5 + 0.1 * 3.25.
    out = update_thresholds(jnp.full(9, 0.5), *pool([1, 2, 3, 4]), min_count=4)
    np.testing.assert_allclose(out, 0.775, rtol=1e-6)


def test_the_floor_holds_the_candidate():
    out = update_thresholds(jnp.full(9, 0.02), *pool(np.full(300, -1.0)))
    np.testing.assert_array_equal(out, np.full(9, 0.02, np.float32))
    out = update_thresholds(jnp.full(9, 0.12), *pool(np.full(300, -1.0)))
    np.testing.assert_allclose(out, 0.11, rtol=1e-6)


def test_a_small_pool_leaves_its_channel_alone():
    scores, mask = pool(np.full(256, 1.0))
    mask = mask.copy()
    mask[2, 0] = False
    mask[5] = False
    now = np.linspace(0.02, 0.1, 9).astype(np.float32)
    with jax.debug_nans(True):
        out = np.asarray(update_thresholds(now, scores, mask))
    assert (out == now).nonzero()[0].tolist() == [2, 5]


def test_scores_behind_the_mask_may_be_nan():
    rng = np.random.default_rng(1)
    mask = rng.random((4, 3, 9, 50)) < 0.6
    scores = np.where(mask, rng.normal(0, 1, mask.shape), np.nan).astype(np.float32)
    now = np.full(9, 0.02)
    with jax.debug_nans(True):
        out = update_thresholds(now, scores, mask, min_count=32)
    np.testing.assert_allclose(
        out, credit_oracle.thresholds(now, scores, mask, min_count=32), rtol=3e-7
    )


def test_the_order_of_rows_and_tokens_does_not_matter():
    rng = np.random.default_rng(2)
    scores = rng.normal(0, 1, (6, 9, 60)).astype(np.float32)
    mask = rng.random(scores.shape) < 0.8
    rows, tokens = rng.permutation(6), rng.permutation(60)
    np.testing.assert_array_equal(
        update_thresholds(init_thresholds(), scores[rows][..., tokens], mask[rows][..., tokens]),
        update_thresholds(init_thresholds(), scores, mask),
    )


@pytest.mark.parametrize("parts", [1, 3])
def test_a_pool_spread_over_mapped_axes(parts):
    rng = np.random.default_rng(3)
    scores = rng.normal(0, 1, (6, 9, 60)).astype(np.float32)
    mask = rng.random(scores.shape) < 0.8
    whole = update_thresholds(init_thresholds(), scores, mask)
    update = functools.partial(
        memcalib_jax.update_thresholds, init_thresholds(), axis_name=("outer", "inner")
    )
    spread = jax.jit(jax.vmap(jax.vmap(update, axis_name="inner"), axis_name="outer"))(
        scores.reshape(parts, 2, -1, 9, 60), mask.reshape(parts, 2, -1, 9, 60)
    )
    np.testing.assert_array_equal(spread, np.broadcast_to(whole, spread.shape))


def test_nothing_is_sorted():
    program = update_thresholds.lower(init_thresholds(), *pool(np.arange(300.0))).as_text()
    assert "stablehlo.while" in program and "sort" not in program


def test_a_quantile_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="quantile must lie in .0, 1., got 75"):
        memcalib_jax.update_thresholds(init_thresholds(), *pool([1.0]), quantile=75)


@pytest.mark.parametrize("channels, scores, mask, message", [
    (9, (8, 30), (8, 30), r"scores must be .*, 9, tokens.*got \[8, 30\] and \[9\]"),
    (9, (1, 30), (1, 30), r"got \[1, 30\] and \[9\]"),
    (9, (9,), (9,), r"got \[9\] and \[9\]"),
    (9, (9, 30), (9, 29), r"mask must have the scores' shape \[9, 30\], got \[9, 29\]"),
])
def test_shapes_that_do_not_fit_are_refused(channels, scores, mask, message):
    with pytest.raises(ValueError, match=message):
        update_thresholds(jnp.zeros(channels), np.ones(scores), np.ones(mask, bool))


@pytest.mark.parametrize("shape", [(9, 0), (0, 9, 5)])
def test_no_scores_at_all_leave_the_thresholds_alone(shape):
    out = update_thresholds(init_thresholds(), np.ones(shape), np.ones(shape, bool), min_count=0)
    np.testing.assert_allclose(out, 0.02, rtol=1e-6)
