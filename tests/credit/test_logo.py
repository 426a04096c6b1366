"""LoGo-GRPO's pure functions against hand-worked values and a float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax.credit import logo_advantages, logo_loss, step_ratios


def oracle_advantages(rewards, groups, valid, epsilon=1e-6, ddof=1):
    """Group by group with numpy's own statistics."""
    advantages = np.zeros(len(rewards))
    for group in set(groups):
        members = [i for i in range(len(rewards)) if groups[i] == group and valid[i]]
        if len(members) >= 2:
            values = np.asarray(rewards, np.float64)[members]
            advantages[members] = (values - values.mean()) / (values.std(ddof=ddof) + epsilon)
    return advantages


def oracle_loss(new, old, reference, advantages, mask, level, clip=0.2, dual=3.0, kl=0.001):
    """Token by token in plain Python."""
    total, count = 0.0, 0
    for s in range(len(new)):
        tokens = [t for t in range(len(new[s])) if mask[s][t]]
        units = [tokens] if level == "step" else [[t] for t in tokens]
        for unit in units:
            if not unit:
                continue
            ratio = np.exp(min(np.mean([new[s][t] - old[s][t] for t in unit]), 3.0))
            a = advantages[s]
            policy = -min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a)
            if a < 0:
                policy = min(policy, -dual * a)
            u = [reference[s][t] - new[s][t] for t in unit]
            total += policy + kl * np.mean([np.exp(x) - x - 1 for x in u])
            count += 1
    return total, count


def random_steps(seed=0, steps=7, width=9):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, width + 1, steps)
    lengths[:2] = 0, width
    mask = np.arange(width) < lengths[:, None]
    new, old, reference = random.normal(-1, 0.4, (3, steps, width))
    return new, old, reference, random.normal(size=steps), mask


def test_advantages_by_hand():
    # Group 0: 1, 2, 3: mean 2, unbiased deviation 1. Group 1: 0, 4: mean 2, deviation sqrt(8).
    advantages = logo_advantages([1, 0, 2, 4, 3], [0, 1, 0, 1, 0], [True] * 5, num_groups=2)
    root = 2 / 8**0.5
    np.testing.assert_allclose(advantages, [-1, -root, 0, root, 1], atol=2e-6)


def test_population_deviation():
    advantages = logo_advantages([0, 2], [0, 0], [True, True], num_groups=1, ddof=0)
    np.testing.assert_allclose(advantages, [-1, 1], atol=2e-6)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_advantages_against_the_oracle(seed, ddof):
    random = np.random.default_rng(seed)
    rewards, groups = random.normal(size=60), random.integers(0, 9, 60)
    valid = random.random(60) < 0.7
    expected = oracle_advantages(rewards, groups, valid, ddof=ddof)
    given = np.where(valid, rewards, np.nan)
    with jax.debug_nans(True):
        advantages = logo_advantages(np.where(valid, rewards, 0.0), groups, valid, num_groups=12,
                                     ddof=ddof)
    np.testing.assert_array_equal(
        advantages, logo_advantages(given, groups, valid, num_groups=12, ddof=ddof))
    np.testing.assert_allclose(advantages, expected, rtol=2e-5, atol=2e-5)
    assert not np.asarray(advantages)[~valid].any()


def test_fewer_than_two_valid_members_and_constant_groups_give_exactly_zero():
    rewards = [5.0, 9.0, 1.0] + [0.35] * 7
    advantages = logo_advantages(rewards, [0, 1, 1] + [2] * 7, [True, True, False] + [True] * 7,
                                 num_groups=3)
    assert not np.asarray(advantages).any()


def test_members_in_any_order_and_groups_of_any_name():
    random = np.random.default_rng(3)
    rewards, groups = random.normal(size=20), random.integers(0, 4, 20)
    valid = random.random(20) < 0.8
    order, names = random.permutation(20), np.array([5, 2, 0, 3])
    straight = np.asarray(logo_advantages(rewards, groups, valid, num_groups=4))
    mixed = logo_advantages(rewards[order], names[groups][order], valid[order], num_groups=6)
    np.testing.assert_allclose(mixed, straight[order], atol=1e-6)


def test_a_local_group_never_mixes_with_others():
    groups = np.array([0] * 16 + [1] * 4 + [2] * 4)
    rewards = np.random.default_rng(0).normal(size=24)
    before = np.asarray(logo_advantages(rewards, groups, [True] * 24, num_groups=3))
    rewards[groups != 1] += np.random.default_rng(1).normal(size=20) * 100
    after = np.asarray(logo_advantages(rewards, groups, [True] * 24, num_groups=3))
    np.testing.assert_array_equal(before[groups == 1], after[groups == 1])
    assert (before[groups != 1] != after[groups != 1]).all()


def test_an_id_out_of_range_counts_as_invalid():
    advantages = logo_advantages([1, 3, 9, 9], [0, 0, 1, -1], [True] * 4, num_groups=1)
    np.testing.assert_allclose(advantages, [-1 / 2**0.5, 1 / 2**0.5, 0, 0], atol=2e-6)


@pytest.mark.parametrize("arguments, settings", [
    (([1, 2], [0], [True, True]), {"num_groups": 1}),
    (([[1, 2]], [[0, 0]], [[True, True]]), {"num_groups": 1}),
    (([1, 2], [0, 0], [True, True]), {"num_groups": 0}),
    (([1, 2], [0, 0], [True, True]), {"num_groups": 1, "ddof": 2}),
])
def test_advantages_refuse_what_does_not_fit(arguments, settings):
    with pytest.raises(ValueError, match="must be"):
        logo_advantages(*map(np.asarray, arguments), **settings)


def test_ratios_by_hand():
    # Means of log-ratios: (.2 + .4) / 2, none, 5 cut to 3.
    new = jnp.array([[0.2, 0.4, jnp.nan], [jnp.nan] * 3, [5.0, 5.0, 5.0]])
    mask = jnp.array([[True, True, False], [False] * 3, [True] * 3])
    np.testing.assert_allclose(step_ratios(new, jnp.zeros((3, 3)), mask),
                               np.exp([0.3, 0.0, 3.0]), rtol=1e-6)


def test_a_ratio_knows_neither_padding_nor_company():
    new, old, _, _, mask = random_steps()
    alone = [float(step_ratios(new[s:s + 1, :n], old[s:s + 1, :n], mask[s:s + 1, :n])[0])
             for s, n in enumerate(mask.sum(1))]
    padded = [np.pad(x, ((0, 3), (0, 127)), constant_values=np.nan) for x in (new, old)]
    ratios = step_ratios(*padded, np.pad(mask, ((0, 3), (0, 127))))
    np.testing.assert_allclose(ratios[:len(alone)], alone, rtol=1e-6)


@pytest.mark.parametrize("level", ["step", "token"])
@pytest.mark.parametrize("seed", range(4))
def test_loss_against_the_oracle(seed, level):
    new, old, reference, advantages, mask = random_steps(seed)
    expected = oracle_loss(new, old, reference, advantages, mask, level)
    holes = [np.where(mask, x, np.nan) for x in (new, old, reference)]
    advantages = np.where(mask.any(1), advantages, np.nan)
    total, count = logo_loss(*holes, advantages, mask, level=level)
    np.testing.assert_allclose((total, count), expected, rtol=2e-5)


def test_clips_by_hand():
    # Ratio e = 2.718: kept at 1.2 where A > 0; at A = -1 the loss is e, and e^2 is cut to 3.
    new, mask = jnp.array([[1.0], [1.0], [2.0]]), jnp.ones((3, 1), bool)
    losses = [float(logo_loss(new[s:s + 1], jnp.zeros((1, 1)), new[s:s + 1], a, mask[s:s + 1])[0])
              for s, a in enumerate([[1.0], [-1.0], [-1.0]])]
    np.testing.assert_allclose(losses, [-1.2, np.e, 3.0], rtol=1e-6)


def test_entropy_is_a_bonus_in_the_unit_of_the_level():
    zeros, mask = jnp.zeros((2, 4)), jnp.array([[True] * 4, [True] + [False] * 3])
    entropies = jnp.where(mask, 2.0, jnp.nan)
    for level, count in (("step", 2), ("token", 5)):
        total, counted = logo_loss(zeros, zeros, zeros, [0.0, 0.0], mask, level=level,
                                   entropies_S_T=entropies, entropy_weight=0.5)
        assert (float(total), float(counted)) == (-count, count)


def test_short_and_long_steps_weigh_the_same():
    mask = np.arange(500) < np.array([[5], [500]])
    zeros = np.zeros((2, 500))

    def loss(shift, level):
        moved = zeros + shift[:, None]
        return logo_loss(moved, zeros, zeros, np.ones(2), mask, kl=0.0, level=level)[0]

    by_step, by_token = (jax.grad(loss)(jnp.zeros(2), level) for level in ("step", "token"))
    np.testing.assert_allclose(by_step, [-1, -1], rtol=1e-5)
    np.testing.assert_allclose(by_token, [-5, -500], rtol=1e-5)


@pytest.mark.parametrize("level", ["step", "token"])
def test_gradients_are_finite_behind_masks_and_sums_add_up(level):
    new, old, reference, advantages, mask = random_steps(5)
    new, old, reference = (jnp.where(mask, x, jnp.nan) for x in (new, old, reference))

    def loss(log_probs, rows=slice(None)):
        return logo_loss(log_probs[rows], old[rows], reference[rows], advantages[rows], mask[rows],
                         level=level)[0]

    with jax.debug_nans(True):
        whole = jax.grad(loss)(jnp.where(mask, new, 0.0))
    gradient = np.asarray(jax.grad(loss)(new))
    np.testing.assert_array_equal(gradient, whole)
    assert not gradient[~mask].any() and gradient[mask].any()
    parts = jax.grad(loss)(new, slice(0, 3)) + jax.grad(loss)(new, slice(3, None))
    np.testing.assert_allclose(parts, gradient, atol=1e-6)


def test_nothing_to_learn_from_is_a_loss_of_zero():
    total, count = logo_loss(*[jnp.full((2, 3), jnp.nan)] * 3, jnp.full(2, jnp.nan),
                             jnp.zeros((2, 3), bool))
    assert (float(total), float(count)) == (0, 0)


def test_loss_refuses_what_does_not_fit():
    x, mask = np.zeros((2, 3)), np.ones((2, 3), bool)
    with pytest.raises(ValueError, match="level must be one of step, token, not 'turn'"):
        logo_loss(x, x, x, np.zeros(2), mask, level="turn")
    with pytest.raises(ValueError, match=r"advantages must be \[2\], got \[3\]"):
        logo_loss(x, x, x, np.zeros(3), mask)
    with pytest.raises(ValueError, match=r"got \[2, 3\], \[2, 3\] and \[3, 2\]"):
        step_ratios(x, x, mask.T)
