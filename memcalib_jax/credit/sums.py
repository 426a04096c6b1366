"""Sums in float32 whose rounding stays out of sight, as the mean-preservation of D.4 needs."""

import math

import jax
import jax.numpy as jnp


def split_sum(values: jax.Array, axis: int, *, limit: float) -> tuple[jax.Array, jax.Array]:
    """Sum along an axis in two float32 parts, a coarse and a fine one, that axis kept as 1.

    The coarse part is exact as long as no partial sum exceeds `limit`: its terms are whole numbers
    of a unit that leaves 23 bits. The fine part is small, and so is its rounding. Above the limit
    the sum is no worse than a plain one.
    """
    per_unit = 2.0 ** (23 - math.ceil(math.log2(max(limit, 1.0))))
    coarse = jnp.round(values * per_unit) / per_unit
    fine = values - coarse
    return jnp.sum(coarse, axis=axis, keepdims=True), jnp.sum(fine, axis=axis, keepdims=True)
