import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import credit_oracle
import memcalib_jax

normalize_groups = jax.jit(memcalib_jax.normalize_groups)
grpo_advantages = jax.jit(memcalib_jax.grpo_advantages)
gdpo_advantages = jax.jit(memcalib_jax.gdpo_advantages, static_argnames="axis_name")

ALL = jnp.ones((1, 8), bool)


def one_channel(values):
    """Rewards [1, G, 9] with all but channel C+ at 0."""
    rewards = np.zeros((1, len(values), 9), np.float32)
    rewards[0, :, 8] = values
    return rewards


def test_two_members_worked_by_hand():
    # Mean 0.5, population deviation 0.5: z-scores 0.5 / 0.500001.
    z = normalize_groups(jnp.array([[1.0, 0.0]]), jnp.ones((1, 2), bool))
    np.testing.assert_allclose(z, [[0.999998, -0.999998]], rtol=1e-7)


def test_deviation_is_the_populations():
    # 1, 2, 3, 4: variance 5/4 with ddof 0 (5/3 with ddof 1).
    z = normalize_groups(jnp.array([[1.0, 2, 3, 4]]), jnp.ones((1, 4), bool), epsilon=0.0)
    np.testing.assert_allclose(z[0, 0], -1.5 / np.sqrt(1.25), rtol=1e-6)


def test_seven_equal_and_one_zero():
    # Mean .30625, deviation .35 sqrt(7) / 8: the rest at 1 / sqrt(7), the one at -sqrt(7).
    z = normalize_groups(jnp.array([[0.35] * 7 + [0.0]]), ALL)
    np.testing.assert_allclose(z[0, :7], 1 / np.sqrt(7), rtol=2e-5)
    np.testing.assert_allclose(z[0, 7], -np.sqrt(7), rtol=2e-5)


def test_the_seven_equal_ones_alone_carry_no_signal():
    valid = ALL.at[0, 7].set(False)
    z = normalize_groups(jnp.array([[0.35] * 7 + [0.0]]), valid)
    np.testing.assert_array_equal(z, 0)


@pytest.mark.parametrize("value", [0.35, 0.1, -1 / 3, 1e-30, 1e30, 3e38, 0.0])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_constant_groups_are_exactly_zero_at_any_magnitude(value, size):
    values = jnp.full((1, size), value, jnp.float32)
    with jax.debug_nans(True):
        z = normalize_groups(values, jnp.ones((1, size), bool), min_std=0.0)
    np.testing.assert_array_equal(z, 0)


def test_a_small_spread_on_a_large_value_survives():
    # 1000 + k / 8 is exact in float32.
    values = 1000 + np.array([[0, 1, 2, 5]]) / 8
    z = normalize_groups(values, np.ones((1, 4), bool))
    np.testing.assert_allclose(z[0], credit_oracle.z_scores(values[0]), rtol=1e-6)


@pytest.mark.parametrize("valid", [[True] + [False] * 7, [False] * 8])
def test_groups_under_two_valid_members_are_zero(valid):
    z = normalize_groups(jnp.arange(8.0)[None], jnp.array([valid]))
    np.testing.assert_array_equal(z, 0)


def test_group_of_one():
    np.testing.assert_array_equal(normalize_groups(jnp.ones((3, 1)), jnp.ones((3, 1), bool)), 0)


def test_spread_under_min_std_is_no_signal():
    values = jnp.array([[0.0, 1e-3]])  # deviation 5e-4
    valid = jnp.ones((1, 2), bool)
    np.testing.assert_array_equal(normalize_groups(values, valid, min_std=6e-4), 0)
    assert normalize_groups(values, valid, min_std=4e-4)[0, 1] > 0.99


@pytest.mark.parametrize("seed", range(4))
def test_missing_members_leave_their_siblings_baseline_alone(seed):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(5, 8)).astype(np.float32)
    valid = rng.random((5, 8)) < 0.6
    poisoned = np.where(valid, values, np.nan).astype(np.float32)
    with jax.debug_nans(True):
        z = normalize_groups(poisoned, valid)
    expected = credit_oracle.group_advantages(values.astype(np.float64), valid)
    np.testing.assert_allclose(z, expected, atol=5e-7)
    np.testing.assert_array_equal(z[~valid], 0)


def test_a_reward_may_be_missing_in_one_channel_only():
    values = jnp.array([[[1.0, 1.0], [0.0, jnp.nan], [0.0, 3.0]]])
    valid = jnp.array([[[True, True], [True, False], [True, True]]])
    z = normalize_groups(values, valid)
    np.testing.assert_allclose(z[0, :, 0], credit_oracle.z_scores([1, 0, 0]), rtol=1e-6)
    np.testing.assert_allclose(z[0, :, 1], [-0.999999, 0, 0.999999], rtol=1e-6)


def test_members_may_be_permuted():
    rng = np.random.default_rng(0)
    values, valid = rng.normal(size=(2, 8)), rng.random((2, 8)) < 0.8
    order = rng.permutation(8)
    np.testing.assert_allclose(
        normalize_groups(values[:, order], valid[:, order]),
        normalize_groups(values, valid)[:, order],
        atol=5e-7,
    )


def test_groups_do_not_see_each_other():
    values = jnp.array([[0.0, 1.0], [100.0, 102.0]])
    both = normalize_groups(values, jnp.ones((2, 2), bool))
    alone = normalize_groups(values[:1], jnp.ones((1, 2), bool))
    np.testing.assert_array_equal(both[:1], alone)


@pytest.mark.parametrize("values", [[[0.35] * 8], [[1.0, 0, 0, 0, 0, 0, 0, 0]]])
@pytest.mark.parametrize("valid", [np.ones((1, 8), bool), np.eye(8, dtype=bool)[:1]])
def test_gradients_are_finite(values, valid):
    def loss(values):
        return jnp.sum(normalize_groups(values, valid) * jnp.arange(8.0))

    with jax.debug_nans(True):
        finite = jax.jit(jax.grad(loss))(jnp.array(values))
    poisoned = jax.jit(jax.grad(loss))(jnp.where(valid, jnp.array(values), jnp.nan))
    np.testing.assert_array_equal(poisoned, finite)
    np.testing.assert_array_equal(poisoned[~valid], 0)


def test_grpo_sums_before_and_gdpo_normalizes_before():
    # Correctness 1 1 0 0 against a length reward 0 100 200 300: the sum gives a wrong, long answer
    # the top GRPO advantage; by channel, scale does not matter.
    rewards = np.zeros((1, 4, 9), np.float32)
    rewards[0, :, 8] = [1, 1, 0, 0]
    rewards[0, :, 4] = [0, 100, 200, 300]
    valid = np.ones((1, 4), bool)
    grpo = np.asarray(grpo_advantages(rewards, valid))[0]
    gdpo = np.asarray(gdpo_advantages(rewards, valid))[0]
    assert grpo.argmax() == 3
    # Channel z-scores 1 1 -1 -1 and (-3 -1 1 3) / sqrt(5).
    sums = np.array([1, 1, -1, -1]) + np.array([-3, -1, 1, 3]) / np.sqrt(5)
    np.testing.assert_allclose(gdpo, sums / np.sqrt((sums**2).mean()), rtol=1e-5)
    assert gdpo.argmax() == 1


def test_a_constant_sum_cancels_in_gdpo_too():
    # Two channels with opposite rewards: z-scores cancel exactly, so no group is "saved".
    rewards = np.zeros((1, 4, 9), np.float32)
    rewards[0, :, 4] = [0, 1 / 3, 2 / 3, 1]
    rewards[0, :, 8] = [1, 2 / 3, 1 / 3, 0]
    np.testing.assert_allclose(gdpo_advantages(rewards, np.ones((1, 4), bool)), 0, atol=1e-3)


def test_gdpo_of_one_channel_worked_by_hand():
    # z-scores +-1 / 1.000002, mean square 1 to 4e-6: advantages +-1.
    gdpo = gdpo_advantages(one_channel([1, 0]), np.ones((1, 2), bool))
    np.testing.assert_allclose(gdpo, [[1, -1]], rtol=2e-6)


def test_weights_act_after_normalization():
    rewards = np.zeros((1, 2, 9), np.float32)
    rewards[0, :, 4] = [1, 0]
    rewards[0, :, 8] = [0, 5]
    weights = np.ones(9)
    weights[8] = 0.5
    # Sums 1 - .5 and -1 + .5, one scale: +-1. Weights before would leave 0.
    gdpo = gdpo_advantages(rewards, np.ones((1, 2), bool), channel_weights=weights)
    np.testing.assert_allclose(gdpo, [[1, -1]], rtol=1e-5)
    # In GRPO they weigh rewards: 1 against 2.5.
    grpo = grpo_advantages(rewards, np.ones((1, 2), bool), channel_weights=weights)
    np.testing.assert_allclose(grpo, [[-1, 1]], rtol=1e-5)


def test_the_scale_is_over_valid_responses_of_the_whole_batch():
    # Two groups, one without signal: S = 1, -1, 0, 0 and one invalid; mean square 2 / 3 of three.
    rewards = np.concatenate([one_channel([1, 0]), one_channel([1, np.nan])])
    valid = np.array([[True, True], [True, False]])
    gdpo = gdpo_advantages(rewards, valid)
    np.testing.assert_allclose(gdpo, [[1.5**0.5, -(1.5**0.5)], [0, 0]], rtol=3e-6)


@pytest.mark.parametrize("method", [grpo_advantages, gdpo_advantages])
def test_a_batch_without_valid_responses_is_zero(method):
    with jax.debug_nans(True):
        out = method(np.full((2, 4, 9), np.nan, np.float32), np.zeros((2, 4), bool))
    np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize("seed", range(6))
def test_methods_against_the_oracle(seed):
    case = credit_oracle.random_case(seed, prompts=8, length=2)
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.2, 2, 9).astype(np.float32)
    rewards, valid = case["rewards"].astype(np.float64), case["valid"]
    grpo = grpo_advantages(case["rewards"], valid, channel_weights=weights)
    expected = credit_oracle.group_advantages((rewards * weights).sum(-1), valid)
    np.testing.assert_array_less(abs(grpo - expected), 2e-6 * np.maximum(1, abs(expected)))
    gdpo = gdpo_advantages(case["rewards"], valid, channel_weights=weights)
    expected = credit_oracle.memcalib(
        credit_oracle.doubled({**case, "scored": np.zeros(rewards.shape, bool)}), weights=weights
    )["token_advantages"][..., 0]
    np.testing.assert_array_less(abs(gdpo - expected), 2e-6 * np.maximum(1, abs(expected)))


def test_gdpo_over_a_mapped_axis_equals_the_whole_batch():
    case = credit_oracle.random_case(3, prompts=6, length=2)
    whole = gdpo_advantages(case["rewards"], case["valid"])
    one_part = functools.partial(gdpo_advantages, axis_name="data")
    parts = jax.jit(jax.vmap(one_part, axis_name="data"))(
        case["rewards"].reshape(3, 2, 8, 9), case["valid"].reshape(3, 2, 8)
    )
    np.testing.assert_allclose(parts.reshape(6, 8), whole, rtol=3e-7)


@pytest.mark.parametrize("rewards, valid", [
    ((2, 3, 9), (3, 2)), ((2, 3, 9), (1, 3)), ((2, 3, 9), (2,)), ((2, 3), (2, 3, 1)), ((3,), (3,)),
])
@pytest.mark.parametrize("method", [normalize_groups, grpo_advantages, gdpo_advantages])
def test_shapes_that_do_not_fit_are_refused(method, rewards, valid):
    with pytest.raises(ValueError, match=r"valid have the first of these axes, got \[.*\] and \["):
        method(np.ones(rewards), np.ones(valid, bool))


@pytest.mark.parametrize("prompts, responses", [(0, 3), (2, 0)])
@pytest.mark.parametrize("method", [grpo_advantages, gdpo_advantages])
def test_nothing_in_nothing_out(method, prompts, responses):
    out = method(np.ones((prompts, responses, 9)), np.ones((prompts, responses), bool))
    assert out.shape == (prompts, responses)
