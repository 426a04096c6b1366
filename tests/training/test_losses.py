import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax.training.losses import MAX_LOG_RATIO, policy_objective


def objective(log_probs, old, reference, advantages, mask, **kwargs):
    arrays = [jnp.asarray(x, jnp.float32) for x in (log_probs, old, reference, advantages)]
    settings = {"clip": 0.2, "kl_weight": 0.01} | kwargs
    return policy_objective(*arrays, jnp.asarray(mask), jnp.zeros(len(mask)), **settings)


def test_hand_worked():
    # Ratios 2, 1/2, 2 and 1/2 with advantages 1, 1, -1 and -1: the clip holds the first at 1.2
    # and the last at 0.8; the others are the smaller terms as they are.
    log_probs = np.log([0.5, 0.25, 0.5, 0.25])
    old = np.log([0.25, 0.5, 0.25, 0.5])
    sums = objective(log_probs, old, log_probs, [1, 1, -1, -1], [True] * 4)
    np.testing.assert_allclose(sums.policy, -(1.2 + 0.5 - 2.0 - 0.8), rtol=1e-6)
    assert float(sums.clipped) == 2
    assert float(sums.kl) == 0.0
    assert float(sums.tokens) == 4
    np.testing.assert_allclose(sums.max_ratio_error, 1.0, rtol=1e-6)
    np.testing.assert_allclose(sums.log_ratio, 0.0, atol=1e-6)


def test_k3_by_hand():
    # u = log 2: exp(u) - u - 1 = 1 - log 2.
    sums = objective(np.log([0.25]), np.log([0.25]), np.log([0.5]), [0.0], [True], kl_weight=0.5)
    np.testing.assert_allclose(sums.kl, 1 - np.log(2), rtol=1e-6)
    np.testing.assert_allclose(sums.loss, 0.5 * (1 - np.log(2)), rtol=1e-6)


def test_against_float64():
    rng = np.random.default_rng(0)
    log_probs, old, reference = (-rng.exponential(size=500) for _ in range(3))
    advantages, mask = rng.normal(size=500), rng.random(500) < 0.7
    sums = objective(log_probs, old, reference, advantages, mask, clip=0.1, kl_weight=0.3)
    ratio = np.exp(log_probs - old)
    policy = -np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages)
    u = reference - log_probs
    kl = np.exp(u) - u - 1
    np.testing.assert_allclose(sums.policy, policy[mask].sum(), rtol=1e-5)
    np.testing.assert_allclose(sums.kl, kl[mask].sum(), rtol=1e-5)
    np.testing.assert_allclose(sums.loss, (policy + 0.3 * kl)[mask].sum(), rtol=1e-5)


@pytest.mark.parametrize("mask", [[True, False, True], [False, False, False]])
def test_nan_behind_the_mask_reaches_nothing(mask):
    dirty = np.where(mask, -1.0, np.nan)

    def loss(log_probs):
        return policy_objective(log_probs, dirty, dirty, dirty, jnp.asarray(mask), dirty,
                                clip=0.2, kl_weight=0.1).loss

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(dirty))
    assert np.isfinite(value)
    np.testing.assert_array_equal(np.isfinite(gradient), True)
    np.testing.assert_array_equal(gradient[~np.asarray(mask)], 0.0)
    if not any(mask):
        assert float(value) == 0.0


def test_gradient_at_the_start_is_minus_the_advantage():
    # At ratio 1 and log pi = log pi_ref, d loss / d log pi = -A: the k3 term has no slope there.
    log_probs, advantages = jnp.array([-1.0, -2.0]), jnp.array([0.5, -3.0])
    gradient = jax.grad(lambda x: policy_objective(
        x, log_probs, log_probs, advantages, jnp.array([True, True]), jnp.zeros(2),
        clip=0.2, kl_weight=0.1).loss)(log_probs)
    np.testing.assert_allclose(gradient, -advantages, rtol=1e-6)


def test_huge_log_ratios_stay_finite():
    sums = objective([0.0, -1000.0], [-1000.0, 0.0], [-1000.0, 0.0], [1.0, -1.0], [True, True])
    assert np.isfinite(float(sums.loss))
    np.testing.assert_allclose(sums.max_ratio_error, np.exp(MAX_LOG_RATIO) - 1, rtol=1e-6)


def test_sums_add_and_average():
    first = objective(np.log([0.5]), np.log([0.25]), np.log([0.5]), [1], [True])
    second = objective(np.log([0.5, 0.3]), np.log([0.5, 0.3]), np.log([0.5, 0.3]), [1, 3],
                       [True, True])
    total = first + second
    averages = total.averages()
    np.testing.assert_allclose(averages["loss/policy"], -(1.2 + 1 + 3) / 3, rtol=1e-6)
    np.testing.assert_allclose(averages["loss/clip_fraction"], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(averages["loss/max_ratio_error"], 1.0, rtol=1e-6)


def test_no_token_averages_to_zero():
    sums = objective([0.0], [0.0], [0.0], [1.0], [False])
    assert set(sums.averages().values()) == {0.0}
