"""Adaptive localization thresholds: an EMA of each channel's score quantile (D.3, 2609.24259)."""

import jax
import jax.numpy as jnp
import numpy as np

from memcalib_jax.credit.channels import CHANNELS
from memcalib_jax.credit.float_order import floats_of, ordered_keys

# Sentence thresholds start at and never fall below this, in nats (H.2); the quantile of their pool,
# and the least of its scores.
SENTENCE_FLOOR = 0.01
SENTENCE_QUANTILE = 0.70
SENTENCE_MIN_COUNT = 32

# Bits of a key that one pass over the pool settles.
_DIGIT = 4
# Above the key of every number.
_TOP = np.uint32(0xFFFFFFFF)


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
    The quantile is the empirical one by numpy's linear rule. For sentence thresholds give
    `quantile=SENTENCE_QUANTILE, floor=SENTENCE_FLOOR, min_count=SENTENCE_MIN_COUNT`.

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
    mask = jnp.asarray(mask_C_T, bool)
    keys = ordered_keys(jnp.asarray(scores_C_T, jnp.float32))
    keys = jnp.where(mask, keys, _TOP)
    pooled = tuple(axis for axis in range(keys.ndim) if axis != keys.ndim - 2)

    def count_where(*conditions):
        # Several counts are one reduction, which reads the pool once.
        ones = [condition.astype(jnp.int32) for condition in conditions]
        counts = jnp.stack(jax.lax.reduce(ones, [jnp.int32(0)] * len(ones), _add_each, pooled))
        return counts if axis_name is None else jax.lax.psum(counts, axis_name)

    (count,) = count_where(mask)
    rank, fraction = _quantile_rank(quantile, jnp.maximum(count, 1))

    def fix_digit(step, key):
        # The order statistic is the largest key with no more than `rank` keys under it.
        shift = (32 - _DIGIT * (1 + step)).astype(jnp.uint32)
        trials = [key | (jnp.uint32(digit) << shift) for digit in range(1, 2**_DIGIT)]
        under = count_where(*(keys < trial[:, None] for trial in trials))
        digit = jnp.sum(under <= rank, axis=0, dtype=jnp.uint32)
        return key | (digit << shift)

    lower = jax.lax.fori_loop(0, 32 // _DIGIT, fix_digit, jnp.zeros(keys.shape[-2], jnp.uint32))
    above, up_to = jax.lax.reduce(
        [jnp.where(keys > lower[:, None], keys, _TOP), (keys <= lower[:, None]).astype(jnp.int32)],
        [_TOP, jnp.int32(0)],
        lambda seen, term: (jnp.minimum(seen[0], term[0]), seen[1] + term[1]),
        pooled,
    )
    if axis_name is not None:
        above, up_to = jax.lax.pmin(above, axis_name), jax.lax.psum(up_to, axis_name)
    upper = jnp.where((up_to > rank + 1) | (rank + 1 >= count), lower, above)

    zero = ordered_keys(jnp.float32(0))
    lower = floats_of(jnp.where(count > 0, lower, zero))
    upper = floats_of(jnp.where(count > 0, upper, zero))
    step = upper - lower
    # From the nearer neighbour, as numpy does: exact at both ends.
    value = jnp.where(fraction < 0.5, lower + step * fraction, upper - step * (1.0 - fraction))
    return value, count


def _add_each(sums, terms):
    return [total + term for total, term in zip(sums, terms)]


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
