import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import credit_oracle
from memcalib_jax import project_multipliers
from memcalib_jax.credit.projection import proportional_multipliers

project = jax.jit(project_multipliers)


@pytest.mark.parametrize(
    "multipliers, cap, expected",
    [
        # Already mean 1 and in range.
        ([0.5, 1.5, 1.0], 4.0, [0.5, 1.5, 1.0]),
        # One token holds all: 4 there, the rest shares 8 - 4 over seven.
        ([8, 0, 0, 0, 0, 0, 0, 0], 4.0, [4] + [4 / 7] * 7),
        # Eight tokens, two of them at the cap: nothing is left.
        ([4, 4, 0, 0, 0, 0, 0, 0], 4.0, [4, 4, 0, 0, 0, 0, 0, 0]),
        # Shorter than the cap: it is never reached.
        ([3, 0, 0], 4.0, [3, 0, 0]),
        ([1], 4.0, [1]),
        ([17], 4.0, [1]),
        # Offset 1: clip(3 - 1), clip(1 - 1), clip(-5 - 1).
        ([3, 1, -5], 2.0, [2, 1, 0]),
        # cap 1 leaves only ones.
        ([9, 0.1, -3], 1.0, [1, 1, 1]),
        ([-7, -7, -7, -7], 4.0, [1, 1, 1, 1]),
    ],
)
def test_rows_worked_by_hand(multipliers, cap, expected):
    out = project(jnp.array(multipliers, jnp.float32), jnp.ones(len(multipliers), bool), cap=cap)
    np.testing.assert_allclose(out, expected, rtol=1.2e-7, atol=6e-8)


def draw(kind, rng, shape, cap):
    if kind == "normal":
        return rng.normal(0, 3, shape)
    if kind == "ties":
        return rng.integers(0, 4, shape) * rng.choice([0.5, 1.25, 0.01], (shape[0], 1))
    if kind == "wide":
        return rng.normal(0, 1, shape) * 10.0 ** rng.integers(-6, 4, shape)
    if kind == "large":
        return rng.normal(0, 1e6, shape)
    if kind == "near the cap":
        return rng.choice([0, cap, cap + 1e-6, 2 * cap, 1, 1 - 1e-6], shape)
    sparse = rng.exponential(1, shape) * (rng.random(shape) < 0.1)
    return sparse / np.maximum(sparse.mean(-1, keepdims=True), 1e-3)


@pytest.mark.parametrize("cap", [1.75, 4.0, 37.5])
@pytest.mark.parametrize("length", [3, 40, 1500])
@pytest.mark.parametrize("kind", ["normal", "ties", "wide", "large", "near the cap", "sparse"])
def test_against_the_sorted_solution(kind, length, cap):
    rng = np.random.default_rng(0)
    rows = 100 if length < 1500 else 8
    multipliers = draw(kind, rng, (rows, length), cap).astype(np.float32)
    mask = rng.random((rows, length)) < rng.uniform(0.1, 1.1, (rows, 1))
    mask[:, 0] = True
    out = np.asarray(project(np.where(mask, multipliers, np.nan), mask, cap=cap), np.float64)
    for row, inside, result in zip(multipliers, mask, out):
        expected = credit_oracle.project(row[inside], cap)
        # A float32 near the cap is known to 1.2e-7 of the cap only.
        np.testing.assert_allclose(result[inside], expected, rtol=0, atol=3e-7 * cap)
        assert abs(result[inside].mean() - 1) < 2.5e-7 * max(1, cap / 4)
        assert result.min() >= 0 and result.max() <= cap
        assert not result[~inside].any()


def test_masked_equals_sliced():
    rng = np.random.default_rng(1)
    multipliers = rng.normal(0, 2, (5, 4, 30)).astype(np.float32)
    mask = np.arange(30) < 17
    padded = project(np.where(mask, multipliers, np.inf), np.broadcast_to(mask, (5, 4, 30)))
    np.testing.assert_allclose(
        padded[..., :17], project(multipliers[..., :17], np.ones((5, 4, 17), bool)), atol=3e-7
    )
    np.testing.assert_array_equal(padded[..., 17:], 0)


def test_an_empty_row_is_zero_and_raises_no_nan():
    with jax.debug_nans(True):
        out = project(np.full((2, 3), np.nan, np.float32), np.zeros((2, 3), bool))
    np.testing.assert_array_equal(out, 0)


def test_a_common_shift_changes_nothing():
    multipliers = np.float32([[0.5, 4.25, 0, 0, 2, 0, 0.125, 7]])
    mask = np.ones((1, 8), bool)
    np.testing.assert_allclose(
        project(multipliers + 1024, mask), project(multipliers, mask), atol=2e-7
    )


def test_projecting_twice_is_projecting_once():
    rng = np.random.default_rng(2)
    mask = np.ones((20, 50), bool)
    once = project(rng.exponential(1, (20, 50)), mask)
    np.testing.assert_allclose(project(once, mask), once, atol=4e-7)


def test_gradients_are_those_of_the_projection():
    # Away from kinks: tokens under 0, free and above the cap.
    multipliers = jnp.array([[-3.0, 0.5, 1.0, 1.5, 9.0, 0.2]])
    mask = jnp.array([[True, True, True, True, True, False]])
    check_grads(
        jax.jit(lambda m, cap: project_multipliers(m, mask, cap=cap)),
        (multipliers, jnp.float32(2.5)),
        order=1,
        modes=["rev", "fwd"],
        rtol=1e-2,
        atol=1e-2,
    )


def test_gradients_behind_masks_are_zero():
    multipliers = jnp.array([[jnp.nan, 1.0, 8.0, 0.0], [jnp.nan] * 4])
    mask = jnp.array([[False, True, True, True], [False] * 4])
    with jax.debug_nans(True):
        gradient = jax.grad(lambda m: jnp.sum(project(m, mask) * jnp.arange(4.0)))(multipliers)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[0, 0], 0)
    np.testing.assert_array_equal(gradient[1], 0)


def test_a_cap_under_one_is_refused():
    with pytest.raises(ValueError, match="cap must be at least 1.*0.5"):
        project_multipliers(jnp.ones(3), jnp.ones(3, bool), cap=0.5)


def test_proportional_multipliers():
    # q = 1, 3, 0 over three of four tokens: T q / Q = 0.75, 2.25, 0.
    scores = jnp.array([[1.0, 3.0, 0.0, jnp.nan], [0, 0, 0, 0]])
    mask = jnp.array([[True, True, True, False]] * 2)
    out = proportional_multipliers(scores, mask)
    np.testing.assert_allclose(out, [[0.75, 2.25, 0, 0], [0, 0, 0, 0]], rtol=1e-7)


def test_proportional_multipliers_keep_the_mean_of_long_rows():
    scores = np.random.default_rng(3).exponential(1, (20, 4000)).astype(np.float32)
    out = np.asarray(proportional_multipliers(scores, np.ones(scores.shape, bool)), np.float64)
    exact = scores.astype(np.float64)
    exact *= 4000 / exact.sum(-1, keepdims=True)
    np.testing.assert_allclose(out, exact, rtol=3e-7)


def test_more_rows_than_are_visited_at_once_most_of_them_empty():
    rng = np.random.default_rng(4)
    multipliers = rng.normal(0, 3, (150, 3, 20)).astype(np.float32)
    mask = (np.arange(20) < rng.integers(0, 21, (150, 3, 1))) & (rng.random((150, 3, 1)) < 0.4)
    out = project(multipliers, mask)
    filled = mask.any(-1)
    assert 128 < filled.sum() < 250
    for row, inside, result in zip(multipliers[filled], mask[filled], out[filled]):
        np.testing.assert_allclose(
            result[inside], credit_oracle.project(row[inside], 4.0), rtol=0, atol=1.2e-6
        )
    assert not np.asarray(out)[~mask].any()


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (2, 0, 5)])
def test_no_rows_and_rows_without_positions(shape):
    none = np.ones(shape)
    assert project_multipliers(none, none > 0).shape == shape
    assert proportional_multipliers(none, none > 0).shape == shape
