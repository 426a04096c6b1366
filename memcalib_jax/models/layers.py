"""The parts of a decoder layer, as functions of arrays with any leading axes.

Products take their inputs in the dtype of the weights and accumulate in float32; the residual
stream, norms and rotations are float32. With float32 weights the products run at the highest
precision the device has.
"""

import functools

import jax
import jax.numpy as jnp

from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.on_mesh import constrained, tensor_spec
from memcalib_jax.models.rope import QueryScale, Rope


def product_precision(weight: jax.Array) -> jax.lax.Precision | None:
    """Returns the highest precision for products with float32 weights, None for others."""
    return jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None


def contract(pattern: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `einsum(pattern, x, weight)` in float32, `x` taken in the weight's dtype."""
    precision = product_precision(weight)
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


def _varying(x) -> frozenset:
    """Returns the mesh axes between whose devices `x` differs inside shard_map."""
    kind = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma  # as the version of jax names it


def _product(x, weight, input_axes):
    """Returns the product over the last `input_axes` of `x` and the first of `weight`, float32."""
    # Inside shard_map both must differ between the same devices: the cast's gradient is the sum.
    axes = _varying(x) | _varying(weight)
    x, weight = (jax.lax.pcast(y, tuple(axes - _varying(y)), to="varying")
                 if axes - _varying(y) else y for y in (x, weight))
    return _differentiable_product(x, weight, input_axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _differentiable_product(x, weight, input_axes):
    return _dot(x.astype(weight.dtype), weight, range(x.ndim - input_axes, x.ndim),
                range(input_axes))


def _dot(first, second, first_axes, second_axes):
    precision = product_precision(second)
    return jax.lax.dot_general(
        first, second, ((tuple(first_axes), tuple(second_axes)), ((), ())), precision=precision,
        preferred_element_type=jnp.float32)


def _product_backward(input_axes, residuals, cotangent):
    x, weight = residuals
    cotangent = cotangent.astype(weight.dtype)
    rows, outputs = x.ndim - input_axes, weight.ndim - input_axes
    d_x = _dot(cotangent, weight, range(rows, rows + outputs), range(input_axes, weight.ndim))
    # Rows by rows, as the weights lie: derived automatically it comes out transposed, for which
    # the CPU has no fast product.
    d_weight = _dot(x.astype(weight.dtype), cotangent, range(rows), range(rows))
    return d_x.astype(x.dtype), d_weight.astype(weight.dtype)


_differentiable_product.defvjp(
    lambda x, weight, input_axes: (_differentiable_product(x, weight, input_axes), (x, weight)),
    _product_backward)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Returns `x / sqrt(mean(x^2) + epsilon) * scale` over the last axis, float32."""
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + epsilon) * scale.astype(jnp.float32)


def norm(x: jax.Array, scale: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns `rms_norm` of `x` with the model's epsilon, its scale counted from 0 or from 1."""
    scale = scale.astype(jnp.float32)
    return rms_norm(x, 1 + scale if config.zero_centred_norms else scale, config.norm_eps)


def rotate(x: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
    """Applies rotary positions to `x [..., heads, head_dim]` at `positions [...]`.

    Of the n leading dimensions that are rotated, dimension i is paired with i + n / 2 (the
    half-split convention of the transformers library); angles are float32.
    """
    # A constant of the program: at position 8,000 an approximate power on the device would move
    # the angles by far more than their own rounding.
    frequencies = rope.frequencies(x.shape[-1]).astype("float32")
    half = len(frequencies)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles) * rope.magnitude, jnp.sin(angles) * rope.magnitude
    first, second, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def scale_queries(q: jax.Array, positions: jax.Array, scale: QueryScale) -> jax.Array:
    """Returns queries `[..., heads, head_dim]` grown by their `positions [...]`."""
    steps = (positions // scale.period).astype(jnp.float32)
    return q * (1 + scale.beta * jnp.log1p(steps))[..., None, None]


def project_qkv(x: jax.Array, positions: jax.Array, layer: dict, config: ModelConfig):
    """Returns what attention takes of the residual stream `x [..., D]`.

    Returns:
      q float32 `[..., H, d]` and k `[..., K, d]`, both rotated, v `[..., K, d]`, and the gate of
      each head's output, float32 `[..., H, d]`, or None. k and v are in the weights' dtype, ready
      to be cached.
    """
    x = norm(x, layer["attention_norm"], config)
    q, k, v = (project(x, layer, name) for name in "qkv")
    gate = None
    if config.attention_gate:
        q, gate = jnp.split(q, 2, axis=-1)
    if config.qk_norm:
        q, k = norm(q, layer["q_norm"], config), norm(k, layer["k_norm"], config)
    q, k = (rotate(heads, positions, config.rope) for heads in (q, k))
    if config.query_scale:
        q = scale_queries(q, positions, config.query_scale)
    return q, k.astype(layer["k"].dtype), v.astype(layer["v"].dtype), gate


def attention_output(x: jax.Array, mixed: jax.Array, gate: jax.Array | None,
                     layer: dict) -> jax.Array:
    """Returns the stream `x [..., D]` plus the projected heads `mixed [..., H, d]`, gated."""
    if gate is not None:
        mixed = mixed * jax.nn.sigmoid(gate)
    return x + project(mixed, layer, "o", input_axes=2)


def gated(y: jax.Array, layer: dict, prefix: str = "") -> jax.Array:
    """Returns SwiGLU of `y [..., D]` through the layer's `gate`, `up` and `down`.

    `prefix` stands before their three names.
    """
    gate = jax.nn.silu(project(y, layer, f"{prefix}gate"))
    return project(gate * project(y, layer, f"{prefix}up"), layer, f"{prefix}down")


def embed(params: dict, tokens: jax.Array) -> jax.Array:
    """Returns the residual stream of `tokens [...]`: float32 `[..., D]`."""
    table = params["embed"]
    # Tokens choose among the rows of a shard of the vocabulary, each of which must be there whole.
    table = constrained(table, tensor_spec(table.shape[0]))
    return table[tokens].astype(jnp.float32)


def head_matrix(params: dict) -> jax.Array:
    """Returns the head `[V, D]`: its own matrix or the tied embedding."""
    return params["head"] if "head" in params else params["embed"]
