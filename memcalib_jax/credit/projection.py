"""Token multipliers in proportion to scores, and their bounded mean-preserving projection.

Section 3.3 and D.4, arXiv 2609.24259. Everything is float32; sums over tokens go through
`split_sum`, so that a response keeps its mean to float32 rounding at any length.
"""

import jax
import jax.numpy as jnp

from memcalib_jax.credit.float_order import floats_of, ordered_keys
from memcalib_jax.credit.sums import split_sum

# Responses of 2,048 tokens that a core's cache holds.
_ROWS_AT_ONCE = 64
_CORRECTIONS = 3


def proportional_multipliers(scores_T: jax.Array, mask_T: jax.Array) -> jax.Array:
    """Spread a response's credit in proportion to its scores: `m = T q / Q`, section 3.3.

    Args:
      scores_T: float [..., T], non-negative.
      mask_T: bool [..., T]. Scores outside it may be anything, NaN included.

    Returns:
      float32 [..., T] with mean 1 over the mask; 0 outside it and where no score is positive.
    """
    scores = jnp.where(mask_T, scores_T, 0.0)
    highest = jnp.max(scores, axis=-1, keepdims=True, initial=0.0)
    some = highest > 0
    shares = scores / jnp.where(some, highest, 1.0)
    total = sum(split_sum(shares, -1, limit=shares.shape[-1]))
    count = jnp.sum(mask_T, axis=-1, keepdims=True).astype(jnp.float32)
    return jnp.where(some, shares * count / jnp.where(some, total, 1.0), 0.0)


def project_multipliers(
    multipliers_T: jax.Array, mask_T: jax.Array, *, cap: float = 4.0
) -> jax.Array:
    """Find the nearest multipliers with mean 1 and none above `cap` (D.4, arXiv 2609.24259).

    Solves `argmin ||x - m||^2` subject to `0 <= x <= cap` and mean 1 over the mask. The solution is
    `clip(m - tau, 0, cap)` for one offset tau, found by bisection on the bits of a float32 and
    closed by Newton steps, which are exact once the tokens at a bound are known. It is
    differentiable in the multipliers and the cap.

    Args:
      multipliers_T: float [..., T]; any finite values.
      mask_T: bool [..., T], the response's tokens. Values outside it may be anything, NaN
        included.
      cap: the upper bound, at least 1 (a lower one leaves nothing to choose from).

    Returns:
      float32 [..., T]; 0 outside the mask, so all 0 where the mask is empty.

    Raises:
      ValueError: `cap` is a Python number under 1.
    """
    if isinstance(cap, (int, float)) and cap < 1:
        raise ValueError(f"cap must be at least 1, the mean to keep, got {cap}")
    mask = jnp.asarray(mask_T, bool)
    values = jnp.where(mask, jnp.asarray(multipliers_T, jnp.float32), 0.0)
    if not values.size:
        return values
    return _project(values, jnp.broadcast_to(mask, values.shape), jnp.asarray(cap, jnp.float32))


@jax.custom_jvp
def _project(values, mask, cap):
    count = jnp.sum(mask, axis=-1, keepdims=True).astype(jnp.float32)
    coarse, fine = _find_offsets(values, mask, count, cap)
    return jnp.where(mask, jnp.clip(values - coarse - fine, 0.0, cap), 0.0)


@_project.defjvp
def _project_jvp(primals, tangents):
    """Share what the free tokens and those at the cap gain among the free ones (D.4)."""
    _, mask, cap = primals
    d_values, _, d_cap = tangents
    projected = _project(*primals)
    free, capped = mask & (projected > 0) & (projected < cap), mask & (projected >= cap)
    gained = jnp.where(free, d_values, jnp.where(capped, d_cap, 0.0))
    num_free = jnp.maximum(jnp.sum(free, axis=-1, keepdims=True), 1).astype(jnp.float32)
    share = jnp.sum(gained, axis=-1, keepdims=True) / num_free
    return projected, gained - jnp.where(free, share, 0.0)


def _find_offsets(values, mask, count, cap):
    """Find each response's offset as a coarse and a fine part, [..., 1] each.

    Few responses of a batch have credit to move: only those with tokens are visited, a few at a
    time, so that the many passes over them stay in a cache.
    """
    counts, shape = count.reshape(-1), (count.size, values.shape[-1])
    values, mask = values.reshape(shape), mask.reshape(shape)
    filled_first = jnp.argsort(counts == 0, stable=True)
    num_filled = jnp.sum(counts > 0)

    def visit(index, offsets):
        # Places beyond the last one repeat it.
        place = index * _ROWS_AT_ONCE + jnp.arange(_ROWS_AT_ONCE)
        rows = filled_first[jnp.minimum(place, num_filled - 1)]
        row_values, row_mask, row_count = values[rows], mask[rows], counts[rows, None]
        coarse = _bisect_offset(row_values, row_mask, row_count, cap)
        # What is left of the tokens in play is small and rounds little.
        left = jnp.where(row_mask, row_values - coarse, 0.0)
        fine = jnp.zeros_like(coarse)
        for _ in range(_CORRECTIONS):
            fine = _correct_offset(fine, left, row_mask, row_count, cap)
        return offsets.at[rows].set(jnp.concatenate([coarse, fine], axis=-1))

    visits = (num_filled + _ROWS_AT_ONCE - 1) // _ROWS_AT_ONCE
    start = jnp.zeros_like(counts, shape=(len(counts), 2))
    coarse, fine = jnp.split(jax.lax.fori_loop(0, visits, visit, start), 2, axis=-1)
    return coarse.reshape(count.shape), fine.reshape(count.shape)


def _bisect_offset(values, mask, count, cap):
    """Find the greatest float32 offset that leaves a sum of at least the count."""

    def halve(_, bracket):
        low, high = bracket
        middle = low + (high - low) // 2
        clipped = jnp.clip(values - floats_of(middle), 0.0, cap)
        total = jnp.sum(jnp.where(mask, clipped, 0.0), axis=-1, keepdims=True)
        enough = total >= count
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    # At the least value minus 1 all are at least 1; at the greatest minus 1 none is above.
    lowest = jnp.min(jnp.where(mask, values, jnp.inf), axis=-1, keepdims=True, initial=jnp.inf)
    highest = jnp.max(jnp.where(mask, values, -jnp.inf), axis=-1, keepdims=True, initial=-jnp.inf)
    bounds = [jnp.where(count > 0, bound - 1.0, 0.0) for bound in (lowest, highest)]
    low, _ = jax.lax.fori_loop(0, 32, halve, tuple(ordered_keys(bound) for bound in bounds))
    return floats_of(low)


def _correct_offset(offset, values, mask, count, cap):
    """Move the offset by the excess over its share among the tokens at neither bound."""
    shifted = values - offset
    clipped = jnp.where(mask, jnp.clip(shifted, 0.0, cap), 0.0)
    # Close to the solution the total is the count of tokens.
    coarse, fine = split_sum(clipped, -1, limit=clipped.shape[-1])
    free = jnp.sum(mask & (shifted > 0) & (shifted < cap), axis=-1, keepdims=True)
    excess = (coarse - count) + fine
    return offset + jnp.where(free > 0, excess / jnp.maximum(free, 1).astype(jnp.float32), 0.0)
