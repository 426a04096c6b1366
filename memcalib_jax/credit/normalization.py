"""Group-normalized advantages: z-scores within a prompt's group, GRPO and GDPO (D.2).

Equations are those of arXiv 2609.24259. The standard deviation is the population's (ddof 0).
"""

import jax
import jax.numpy as jnp

from memcalib_jax.credit.sums import split_sum


def normalize_groups(
    values_P_G: jax.Array,
    valid_P_G: jax.Array,
    *,
    epsilon: float = 1e-6,
    min_std: float = 1e-6,
) -> jax.Array:
    """Turn values into z-scores of their group: `(R - mu) / (sigma + epsilon)`, section 3.3.

    `mu` and `sigma` (population, ddof 0) are over the valid members of each group.

    Args:
      values_P_G: float [P, G, ...]; every further axis is normalized on its own.
      valid_P_G: bool [P, G], or with any of the further axes of `values_P_G` (a reward missing
        in one channel only). Values outside it may be anything, NaN included.
      epsilon: added to sigma.
      min_std: a group whose sigma lies under it has no signal.

    Returns:
      float32, the shape of `values_P_G`: 0 for invalid members, for groups with fewer than two
      valid members and for groups whose sigma is under `min_std`; exactly 0 where all valid
      values are equal, at any magnitude.

    Raises:
      ValueError: shapes that do not fit together.
    """
    values = jnp.asarray(values_P_G, jnp.float32)
    valid = jnp.asarray(valid_P_G, bool)
    _check_shapes(values, valid)
    if not values.size:
        return values
    valid = valid.reshape(valid.shape + (1,) * (values.ndim - valid.ndim))
    valid = jnp.broadcast_to(valid, values.shape)
    values = jnp.where(valid, values, 0.0)
    # Differences to one member are exactly 0 in a constant group; a float32 mean may not be.
    first = jnp.argmax(valid, axis=1, keepdims=True)
    relative = jnp.where(valid, values - jnp.take_along_axis(values, first, axis=1), 0.0)
    count = jnp.maximum(jnp.sum(valid, axis=1, keepdims=True), 1).astype(jnp.float32)
    mean = jnp.sum(relative, axis=1, keepdims=True) / count
    deviation = jnp.where(valid, relative - mean, 0.0)
    variance = jnp.sum(jnp.square(deviation), axis=1, keepdims=True) / count
    varies = variance > 0
    # sqrt has no gradient at 0.
    std = jnp.sqrt(jnp.where(varies, variance, 1.0))
    varies &= std >= min_std
    return jnp.where(valid & varies, deviation / jnp.where(varies, std + epsilon, 1.0), 0.0)


def _check_shapes(values, valid):
    """Refuse what broadcasting would take for something else."""
    if not 2 <= valid.ndim <= values.ndim or valid.shape != values.shape[: valid.ndim]:
        raise ValueError(
            "values (or rewards) must be [prompts, responses, ...] and valid have the first of "
            f"these axes, got {list(values.shape)} and {list(valid.shape)}"
        )


def weigh_channels(values_P_G_C: jax.Array, channel_weights: jax.Array | None) -> jax.Array:
    """Multiply by the weights [C]; None means ones."""
    if channel_weights is None:
        return values_P_G_C
    return values_P_G_C * jnp.asarray(channel_weights, jnp.float32)


def total_advantages(advantages_P_G_C: jax.Array, channel_weights: jax.Array | None) -> jax.Array:
    """Sum the weighted channel advantages of each response: `S` of D.2, float32 [P, G]."""
    weighted = weigh_channels(advantages_P_G_C, channel_weights)
    _, members, channels = weighted.shape
    # No z-score of a group exceeds sqrt(members - 1).
    coarse, fine = split_sum(weighted, -1, limit=channels * members**0.5)
    return jnp.squeeze(coarse + fine, axis=-1)


def batch_rms(
    totals_P_G: jax.Array,
    valid_P_G: jax.Array,
    *,
    epsilon: float = 1e-6,
    axis_name: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Return `sigma_S = sqrt(mean of S^2 + epsilon)` over the valid responses (D.2), a scalar.

    Without a valid response it is `sqrt(epsilon)`.
    """
    squares = jnp.sum(jnp.square(jnp.where(valid_P_G, totals_P_G, 0.0)))
    count = jnp.sum(valid_P_G).astype(jnp.float32)
    if axis_name is not None:
        squares, count = jax.lax.psum((squares, count), axis_name)
    return jnp.sqrt(squares / jnp.maximum(count, 1.0) + epsilon)


def grpo_advantages(
    rewards_P_G_C: jax.Array, valid_P_G: jax.Array, *, channel_weights: jax.Array | None = None
) -> jax.Array:
    """Sum the channel rewards, then normalize within each group: `A^GRPO`, D.2.

    Args:
      rewards_P_G_C: float [P, G, C].
      valid_P_G: bool [P, G]. Rewards of an invalid response may be anything, NaN included.
      channel_weights: float [C] or None for ones.

    Returns:
      float32 [P, G], one advantage for all tokens of a response; 0 where invalid.
    """
    valid, rewards = jnp.asarray(valid_P_G, bool), jnp.asarray(rewards_P_G_C, jnp.float32)
    _check_shapes(rewards, valid)
    rewards = jnp.where(valid[..., None], rewards, 0.0)
    return normalize_groups(jnp.sum(weigh_channels(rewards, channel_weights), axis=-1), valid)


def gdpo_advantages(
    rewards_P_G_C: jax.Array,
    valid_P_G: jax.Array,
    *,
    channel_weights: jax.Array | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Normalize each channel within its group, sum, divide by the batch's RMS: Eq. (1), D.2.

    The RMS is over the valid responses of the whole rollout batch, while a loss averages tokens
    over each mini-batch: call this once on the whole batch.

    Args:
      rewards_P_G_C: float [P, G, C].
      valid_P_G: bool [P, G]. Rewards of an invalid response may be anything, NaN included.
      channel_weights: float [C] or None for ones; they act after the group normalization.
      axis_name: mapped axes (inside shard_map or vmap) over which the batch is spread.

    Returns:
      float32 [P, G], one advantage for all tokens of a response; 0 where invalid.
    """
    valid = jnp.asarray(valid_P_G, bool)
    totals = total_advantages(normalize_groups(rewards_P_G_C, valid), channel_weights)
    return totals / batch_rms(totals, valid, axis_name=axis_name)
