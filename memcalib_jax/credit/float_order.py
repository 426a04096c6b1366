"""Whole numbers in the order of float32 values, so that bisection reaches every float32."""

import jax
import jax.numpy as jnp


def ordered_keys(values: jax.Array) -> jax.Array:
    """Map float32 to uint32 so that keys compare as the values do; -0.0 comes just under 0.0."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits < sign, bits | sign, ~bits)


def floats_of(keys: jax.Array) -> jax.Array:
    """Invert `ordered_keys`."""
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(keys < sign, ~keys, keys ^ sign)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
