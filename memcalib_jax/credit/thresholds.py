"""Adaptive localization thresholds: an EMA of each channel's score quantile (D.3, 2609.24259)."""

import jax
import jax.numpy as jnp

from memcalib_jax.credit.channels import CHANNELS
from memcalib_jax.credit.float_order import floats_of, ordered_keys


def init_thresholds(*, initial: float = 0.02) -> jax.Array:
    """Return the first batch's thresholds, in nats, float32 [C] (D.3); 0.01 for sentences."""
    return jnp.full(len(CHANNELS), initial, jnp.float32)


def update_thresholds(
    thresholds_C: jax.Array,
    scores_C_T: jax.Array,
    mask_C_T: jax.Array,
    *,
    quantile: float = 0.75,
    floor: float = 0.02,
    decay: float = 0.9,
    min_count: int = 256,
    axis_name: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Move each threshold towards a quantile of the batch's scores (D.3, arXiv 2609.24259).

    `candidate = max(floor, quantile of the pool)`, `next = decay * now + (1 - decay) * candidate`.
    The quantile is the empirical one by numpy's linear rule. For sentence thresholds: quantile
    0.70, floor 0.01, min_count 32.

    Args:
      thresholds_C: float32 [C], the batch's thresholds, in nats.
      scores_C_T: float [..., C, T], aligned and clipped scores, in nats; each channel's pool is
        over all other axes.
      mask_C_T: bool [..., C, T], which scores are in the pool. Others may be anything, NaN
        included.
      quantile: in [0, 1].
      floor: the least candidate, in nats.
      decay: weight of the present threshold.
      min_count: with fewer scores in its pool a threshold stays as it is.
      axis_name: mapped axes (inside shard_map or vmap) over which the pool is spread; every device
        gets the same value. Leave None under plain jit.

    Returns:
      float32 [C].

    Raises:
      ValueError: `quantile` is a Python number outside [0, 1], or shapes do not fit together.
    """
    if isinstance(quantile, (int, float)) and not 0 <= quantile <= 1:
        raise ValueError(f"quantile must lie in [0, 1], got {quantile}")
    thresholds = jnp.asarray(thresholds_C, jnp.float32)
    if jnp.shape(scores_C_T)[-2:-1] != thresholds.shape or jnp.ndim(thresholds) != 1:
        raise ValueError(
            f"scores must be [..., {len(CHANNELS)}, tokens] and thresholds [{len(CHANNELS)}], "
            f"got {list(jnp.shape(scores_C_T))} and {list(thresholds.shape)}"
        )
    if jnp.shape(mask_C_T) != jnp.shape(scores_C_T):
        raise ValueError(
            f"the mask must have the scores' shape {list(jnp.shape(scores_C_T))}, "
            f"got {list(jnp.shape(mask_C_T))}"
        )
    value, count = _pool_quantile(scores_C_T, mask_C_T, quantile, axis_name)
    candidate = jnp.maximum(value, floor)
    moved = thresholds + (1.0 - decay) * (candidate - thresholds)
    return jnp.where(count >= min_count, moved, thresholds)


def _pool_quantile(scores_C_T, mask_C_T, quantile, axis_name):
    """Return each channel's quantile and count, [C] each; an empty pool's quantile is 0."""
    keys = ordered_keys(jnp.asarray(scores_C_T, jnp.float32))
    keys = jnp.where(mask_C_T, keys, jnp.uint32(0xFFFFFFFF))  # above every number
    pooled = tuple(axis for axis in range(keys.ndim) if axis != keys.ndim - 2)

    def count_where(condition):
        counted = jnp.sum(condition, axis=pooled, dtype=jnp.int32)
        return counted if axis_name is None else jax.lax.psum(counted, axis_name)

    count = count_where(jnp.broadcast_to(jnp.asarray(mask_C_T, bool), keys.shape))
    rank, fraction = _quantile_rank(quantile, jnp.maximum(count, 1))

    def fix_bit(step, key):
        # The order statistic is the largest key with no more than `rank` keys under it.
        trial = key | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        return jnp.where(count_where(keys < trial[:, None]) <= rank, trial, key)

    lower = jax.lax.fori_loop(0, 32, fix_bit, jnp.zeros(keys.shape[-2], jnp.uint32))
    above = jnp.min(keys, axis=pooled, where=keys > lower[:, None], initial=jnp.uint32(0xFFFFFFFF))
    if axis_name is not None:
        above = jax.lax.pmin(above, axis_name)
    repeated = count_where(keys <= lower[:, None]) > rank + 1
    upper = jnp.where(repeated | (rank + 1 >= count), lower, above)

    zero = ordered_keys(jnp.float32(0))
    lower = floats_of(jnp.where(count > 0, lower, zero))
    upper = floats_of(jnp.where(count > 0, upper, zero))
    step = upper - lower
    # From the nearer neighbour, as numpy does: exact at both ends.
    value = jnp.where(fraction < 0.5, lower + step * fraction, upper - step * (1.0 - fraction))
    return value, count


def _quantile_rank(quantile, count_C):
    """Split `quantile * (count - 1)` into its whole part and fraction.

    In fixed point with 31 fractional bits, as a float32 product of large counts has no fraction
    left: four products of 16-bit halves make the 64 bits of the product.
    """
    if isinstance(quantile, (int, float)):
        scaled = jnp.uint32(round(quantile * 2**31))
    else:
        scaled = jnp.round(quantile * 2.0**31).astype(jnp.uint32)
    last = (count_C - 1).astype(jnp.uint32)
    half = jnp.uint32(0xFFFF)
    low = (last & half) * (scaled & half)
    middle = (last >> 16) * (scaled & half) + (low >> 16)
    cross = (last & half) * (scaled >> 16) + (middle & half)
    high = (last >> 16) * (scaled >> 16) + (middle >> 16) + (cross >> 16)
    low = (cross << 16) | (low & half)
    whole = (high << 1) | (low >> 31)
    fraction = (low & jnp.uint32(0x7FFFFFFF)).astype(jnp.float32) * 2.0**-31
    return whole.astype(jnp.int32), fraction
