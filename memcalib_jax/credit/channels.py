"""The nine channels of ideal and actual memory use (section 3.1 and D.1, arXiv 2609.24259).

A level says how far one memory atom may shape (ideal) or did shape (actual) a response. A channel
holds the atoms of one (ideal, actual) pair; its index is `3 * ideal + actual`.
"""

import jax
import jax.numpy as jnp

IGNORE, BOUND, CONTROL = 0, 1, 2

# A, B, C stand for Ignore, Bound, Control; + marks a rewarded channel, - a punished one.
CHANNELS = ("A+", "AB-", "AC-", "BA-", "B+", "BC-", "CA-", "CB-", "C+")

_AB, _AC = CHANNELS.index("AB-"), CHANNELS.index("AC-")


def channel_levels() -> tuple[jax.Array, jax.Array]:
    """Return the ideal and the actual level of each channel, int32 [C] each."""
    return jnp.divmod(jnp.arange(len(CHANNELS)), 3)


def channel_members(
    ideal_A: jax.Array,
    actual_A: jax.Array,
    atom_mask_A: jax.Array,
    *,
    merge_overuse: bool = False,
) -> jax.Array:
    """Sort atoms into channels: the sets I of section 3.1, arXiv 2609.24259.

    Args:
      ideal_A: int [..., A], the ideal level of each atom: 0 IGNORE, 1 BOUND, 2 CONTROL.
      actual_A: int [..., A], the judged level; leading axes broadcast against `ideal_A`.
      atom_mask_A: bool [..., A]. An atom outside it is in no channel, whatever its levels.
      merge_overuse: put every over-used Ignore atom in AB- and leave AC- empty.

    Returns:
      bool [..., C, A]: which atoms each channel holds. A level outside 0..2 is in no channel.
    """
    ideal_C, actual_C = channel_levels()
    members = (
        (jnp.asarray(ideal_A)[..., None, :] == ideal_C[:, None])
        & (jnp.asarray(actual_A)[..., None, :] == actual_C[:, None])
        & jnp.asarray(atom_mask_A, bool)[..., None, :]
    )
    if merge_overuse:
        either = members[..., _AB, :] | members[..., _AC, :]
        members = members.at[..., _AB, :].set(either).at[..., _AC, :].set(False)
    return members


def channel_rewards(
    ideal_A: jax.Array, actual_A: jax.Array, atom_mask_A: jax.Array
) -> jax.Array:
    """Reward each channel's share of the atoms of its ideal level (section 3.1, arXiv 2609.24259).

    `R = |I| / Z` where the use is right, `-|I| / Z * |actual - ideal|` where it is wrong, with `Z`
    the number of atoms of the channel's ideal level, at least 1.

    Args:
      ideal_A: int [..., A], the ideal level of each atom: 0 IGNORE, 1 BOUND, 2 CONTROL.
      actual_A: int [..., A], the judged level; leading axes broadcast against `ideal_A`.
      atom_mask_A: bool [..., A]. An atom outside it counts nowhere.

    Returns:
      float32 [..., C], in [-2, 1]; 0 exactly where a channel holds no atom.
    """
    ideal_C, actual_C = channel_levels()
    members = channel_members(ideal_A, actual_A, atom_mask_A)
    of_level = (jnp.asarray(ideal_A)[..., None, :] == ideal_C[:, None]) & jnp.asarray(
        atom_mask_A, bool
    )[..., None, :]
    per_atom_C = jnp.where(ideal_C == actual_C, 1, -jnp.abs(actual_C - ideal_C))
    # The numerator is a whole number, so that one rounding remains.
    earned = (per_atom_C * jnp.sum(members, axis=-1)).astype(jnp.float32)
    return earned / jnp.maximum(jnp.sum(of_level, axis=-1), 1).astype(jnp.float32)


def merge_overuse_rewards(rewards_C: jax.Array) -> jax.Array:
    """Add the reward of AC- to AB- and leave AC- at 0; float [..., C], merged twice as once."""
    return rewards_C.at[..., _AB].add(rewards_C[..., _AC]).at[..., _AC].set(0.0)
