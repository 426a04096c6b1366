"""The parts of a decoder layer, as functions of arrays with any leading axes.

Products take their inputs in the dtype of the weights and accumulate in float32; the residual
stream, norms and rotations are float32. With float32 weights the products run at the highest
precision the device has.
"""

import jax
import jax.numpy as jnp
import numpy as np

from memcalib_jax.models.config import ModelConfig


def contract(pattern: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `einsum(pattern, x, weight)` in float32, `x` taken in the weight's dtype."""
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return jnp.einsum(pattern, x.astype(weight.dtype), weight, precision=precision,
                      preferred_element_type=jnp.float32)


def project(x: jax.Array, layer: dict, name: str, *, input_axes: int = 1) -> jax.Array:
    """Returns the projection `name` of `x`, plus its bias and its low-rank adapter if any.

    Args:
      x: float `[..., inputs]`, whose last `input_axes` axes are the inputs.
      layer: holds `name [inputs, outputs]` and maybe `name_bias [outputs]` and the adapter
        `name_lora_a [inputs, r]`, `name_lora_b [r, outputs]`; inputs and outputs may be several
        axes.

    Returns:
      float32 `[..., outputs]`.
    """
    y = _product(x, layer[name], input_axes)
    if f"{name}_lora_a" in layer:
        y = y + _product(_product(x, layer[f"{name}_lora_a"], input_axes),
                         layer[f"{name}_lora_b"], 1)
    if f"{name}_bias" in layer:
        y = y + layer[f"{name}_bias"].astype(jnp.float32)
    return y


def _product(x, weight, input_axes):
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return jnp.tensordot(x.astype(weight.dtype), weight, axes=input_axes, precision=precision,
                         preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Returns `x / sqrt(mean(x^2) + epsilon) * scale` over the last axis, float32."""
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + epsilon) * scale.astype(jnp.float32)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Applies rotary positions to `x [..., heads, head_dim]` at `positions [...]`.

    Dimension i is paired with i + head_dim / 2 (the half-split convention of the
    transformers library); angles are float32.
    """
    half = x.shape[-1] // 2
    # A constant of the program: at position 8,000 an approximate power on the device would move
    # the angles by far more than their own rounding.
    frequencies = (theta ** (-np.arange(half) / half)).astype(np.float32)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def project_qkv(x: jax.Array, positions: jax.Array, layer: dict, config: ModelConfig):
    """Returns q `[..., H, d]`, k and v `[..., K, d]` of the residual stream `x [..., D]`.

    q and k are rotated; k and v are in the weights' dtype, ready to be cached.
    """
    x = rms_norm(x, layer["attention_norm"], config.norm_eps)
    q, k, v = (project(x, layer, name) for name in "qkv")
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.norm_eps)
        k = rms_norm(k, layer["k_norm"], config.norm_eps)
    q = rotate(q, positions, config.rope_theta)
    k = rotate(k, positions, config.rope_theta)
    return q, k.astype(layer["k"].dtype), v.astype(layer["v"].dtype)


def attention_output(x: jax.Array, mixed: jax.Array, layer: dict) -> jax.Array:
    """Returns the stream `x [..., D]` plus the projected heads `mixed [..., H, d]`."""
    return x + project(mixed, layer, "o", input_axes=2)


def mlp(x: jax.Array, layer: dict, config: ModelConfig) -> jax.Array:
    """Returns the stream `x [..., D]` plus its gated MLP."""
    y = rms_norm(x, layer["mlp_norm"], config.norm_eps)
    gated = jax.nn.silu(project(y, layer, "gate")) * project(y, layer, "up")
    return x + project(gated, layer, "down")


def embed(params: dict, tokens: jax.Array) -> jax.Array:
    """Returns the residual stream of `tokens [...]`: float32 `[..., D]`."""
    return params["embed"][tokens].astype(jnp.float32)


def head_matrix(params: dict) -> jax.Array:
    """Returns the head `[V, D]`: its own matrix or the tied embedding."""
    return params["head"] if "head" in params else params["embed"]
