import jax.numpy as jnp
import numpy as np
import pytest

import credit_oracle
from memcalib_jax import (
    BOUND,
    CHANNELS,
    CONTROL,
    IGNORE,
    channel_members,
    channel_rewards,
    localization_signs,
)
from memcalib_jax.credit.channels import merge_overuse_rewards


def test_channel_index_is_three_times_ideal_plus_actual():
    assert CHANNELS[3 * IGNORE + CONTROL] == "AC-"
    assert CHANNELS[3 * CONTROL + BOUND] == "CB-"
    assert CHANNELS[3 * BOUND + BOUND] == "B+"


def test_members_of_a_response_worked_by_hand():
    # Two Ignore atoms (right, used as Bound), one Bound used as Control, one Control ignored, and
    # one atom outside the mask.
    ideal = jnp.array([0, 0, 1, 2, 2])
    actual = jnp.array([0, 1, 2, 0, 2])
    members = channel_members(ideal, actual, jnp.array([1, 1, 1, 1, 0], bool))
    named = {
        name: np.flatnonzero(row).tolist() for name, row in zip(CHANNELS, members) if row.any()
    }
    assert named == {"A+": [0], "AB-": [1], "BC-": [2], "CA-": [3]}


def test_rewards_of_a_response_worked_by_hand():
    # Ignore: one right, one Bound, two Control of four; Bound: one ignored of one; Control: one
    # right, one Bound, one ignored of three.
    ideal = jnp.array([0, 0, 0, 0, 1, 2, 2, 2])
    actual = jnp.array([0, 1, 2, 2, 0, 2, 1, 0])
    rewards = channel_rewards(ideal, actual, jnp.ones(8, bool))
    expected = [0.25, -0.25, -1.0, -1.0, 0.0, 0.0, -2 / 3, -1 / 3, 1 / 3]
    np.testing.assert_array_equal(rewards, np.float32(expected))


def test_masked_atoms_count_neither_above_nor_below_the_line():
    ideal = jnp.array([[2, 2, 0]])
    actual = jnp.array([[2, 77, -5]])
    mask = jnp.array([[True, False, False]])
    rewards = channel_rewards(ideal, actual, mask)
    np.testing.assert_array_equal(rewards, [[0, 0, 0, 0, 0, 0, 0, 0, 1]])
    np.testing.assert_array_equal(channel_rewards(ideal, actual, jnp.zeros((1, 3), bool)), 0)


def test_a_level_outside_the_three_is_in_no_channel():
    # 3 * 1 - 1 would otherwise be the index of AC-.
    members = channel_members(jnp.array([1, 0]), jnp.array([-1, 3]), jnp.ones(2, bool))
    assert not members.any()


def test_ideal_levels_broadcast_over_the_group():
    rng = np.random.default_rng(0)
    ideal = rng.integers(0, 3, (4, 1, 6))
    actual = rng.integers(0, 3, (4, 5, 6))
    rewards = channel_rewards(ideal, actual, np.ones((4, 1, 6), bool))
    assert rewards.shape == (4, 5, 9) and rewards.dtype == jnp.float32
    for p, g in np.ndindex(4, 5):
        np.testing.assert_allclose(
            rewards[p, g], credit_oracle.rewards(ideal[p, 0], actual[p, g]), rtol=1e-7
        )


def test_shuffling_atoms_moves_members_and_leaves_rewards():
    rng = np.random.default_rng(1)
    ideal, actual = rng.integers(0, 3, (2, 9))
    mask = rng.random(9) < 0.7
    order = rng.permutation(9)
    members = channel_members(ideal, actual, mask)
    shuffled = channel_members(ideal[order], actual[order], mask[order])
    np.testing.assert_array_equal(shuffled, members[:, order])
    np.testing.assert_array_equal(
        channel_rewards(ideal[order], actual[order], mask[order]),
        channel_rewards(ideal, actual, mask),
    )


def test_merged_overuse_shares_the_first_channel():
    ideal, actual, mask = jnp.array([0, 0, 0, 0]), jnp.array([0, 1, 2, 2]), jnp.ones(4, bool)
    members = channel_members(ideal, actual, mask, merge_overuse=True)
    np.testing.assert_array_equal(members[1], [False, True, True, True])
    assert not members[2].any() and members[0].sum() == 1
    once = merge_overuse_rewards(channel_rewards(ideal, actual, mask))
    np.testing.assert_array_equal(once[:3], [0.25, -1.25, 0])
    np.testing.assert_array_equal(merge_overuse_rewards(once), once)


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("ordered", [0, 1, 1, -1, 1, 1, -1, -1, 1]),
        ("absolute", [0, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("positive_only", [0, 1, 1, 0, 1, 1, 0, 1, 1]),
        ("guarded", [0, 1, 1, -1, 1, 1, -1, -1, 1]),
    ],
)
def test_signs(mode, expected):
    signs = localization_signs(mode)
    assert signs.dtype == jnp.float32
    np.testing.assert_array_equal(signs, expected)


def test_an_unknown_mode_is_named():
    with pytest.raises(ValueError, match="mode must be one of ordered, absolute.*'both'"):
        localization_signs("both")
