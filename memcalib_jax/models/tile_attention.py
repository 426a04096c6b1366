"""Attention of one bin's segments, a tile of queries against a block of keys at a time.

Softmax is accumulated over the blocks in float32 with a running maximum, so that no row of scores
is ever whole; the backward pass takes the blocks again. Loops run over the tiles and blocks there
are: what a segment does not see costs nothing, whatever room the layout leaves.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from memcalib_jax.models.layers import product_precision

ATTENTION_RESULTS = "attention"  # what a rematerialization policy calls what is kept
# Queries of a tile, and keys of a block.
LARGEST_SPAN, SMALLEST_SPAN = 128, 32
SPANS_A_BIN = 16


def span_of(size: int, num_segments: int) -> int:
    """Returns the span of tiles and blocks in bins of `size` tokens.

    Where a small bin has room for several segments, these are short, and most of a large tile
    would be empty.
    """
    if num_segments == 1:
        return LARGEST_SPAN
    power = 1 << max(size // SPANS_A_BIN, 1).bit_length() - 1
    return min(max(power, SMALLEST_SPAN), LARGEST_SPAN)


@struct.dataclass
class Tile:
    """Consecutive queries of one segment, and the stretches of keys that they see.

    Attributes:
      start: int32 scalar, place of the first query in the bin.
      valid: bool `[span]`, true at queries of the segment.
      limits: int32 `[span]`, how many of the segment's own keys each query sees.
      starts, lengths: int32 `[A + 1]`, the ancestors' stretches and then the segment's own.
    """

    start: jax.Array
    valid: jax.Array
    limits: jax.Array
    starts: jax.Array
    lengths: jax.Array


def attend_tiles(q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, length: jax.Array,
                 ancestor_start: jax.Array, ancestor_length: jax.Array) -> jax.Array:
    """Returns softmax(q k / sqrt(d)) v, each query over what its segment lets it see.

    Args:
      q: float `[N, K, R, d]`, R query heads for each of K key heads.
      k, v: `[N, K, d]`; products take their dtype, sums and softmax are float32.
      start, length: int32 `[S]`, each segment's first token and number of tokens; a token belongs
        to at most one segment.
      ancestor_start, ancestor_length: int32 `[S, A]`, the stretches seen before a segment's own.

    Returns:
      float32 `[N, K, R, d]`, differentiable in q, k and v; 0 for tokens of no segment, whose
      inputs have no influence as long as they are finite.
    """
    size = q.shape[0]
    layout = tuple(map(jnp.asarray, (start, length, ancestor_start, ancestor_length)))
    span = span_of(size, len(layout[0]))
    scaled = _heads_first(q * q.shape[-1] ** -0.5, span).astype(k.dtype)
    out = _attend(scaled, _heads_first(k, span), _heads_first(v, span), layout, span)
    return out[:, :size].swapaxes(0, 1)


def _heads_first(x, room):
    """Returns `[N, K, ...]` as `[K, N + room, ...]`: a slice at any token stays inside."""
    return jnp.pad(x.swapaxes(0, 1), [(0, 0), (0, room)] + [(0, 0)] * (x.ndim - 2))


def _each_tile(layout, span: int, body: Callable, carry):
    """Returns `carry` after `carry = body(tile, carry)` of every tile of every segment."""
    start, length, ancestor_start, ancestor_length = layout
    within = jnp.arange(span)

    def segment(s, carry):
        starts = jnp.append(ancestor_start[s], start[s])

        def tile(t, carry):
            first = t * span
            own = jnp.minimum(first + span, length[s])
            return body(Tile(start[s] + first, first + within < length[s], first + within + 1,
                             starts, jnp.append(ancestor_length[s], own)), carry)

        return jax.lax.fori_loop(0, -(-length[s] // span), tile, carry)

    return jax.lax.fori_loop(0, start.shape[0], segment, carry)


def _each_block(tile: Tile, body: Callable, carry):
    """Returns `carry` after `carry = body(place, seen, carry)` of every block that a tile sees.

    `place` is the block's first key, `seen [span, span]` which query sees which key.
    """
    span = tile.valid.shape[0]
    blocks = -(-tile.lengths // span)
    ends = jnp.cumsum(blocks)
    own = tile.lengths.shape[0] - 1

    def block(i, carry):
        stretch = jnp.sum(i >= ends[:-1])
        first = (i - ends[stretch] + blocks[stretch]) * span
        limits = jnp.where(stretch == own, tile.limits, tile.lengths[stretch])
        seen = (first + jnp.arange(span) < limits[:, None]) & tile.valid[:, None]
        return body(tile.starts[stretch] + first, seen, carry)

    return jax.lax.fori_loop(0, ends[-1], block, carry)


def _take(x, place, size):
    return jax.lax.dynamic_slice_in_dim(x, place, size, axis=1)


def _put(x, new, place):
    return jax.lax.dynamic_update_slice_in_dim(x, new, place, axis=1)


def _put_valid(x, new, tile):
    """Writes the valid rows of a tile's `new [K, T, ...]`; those behind are other segments'."""
    valid = tile.valid.reshape(1, -1, *[1] * (x.ndim - 2))
    return _put(x, jnp.where(valid, new, _take(x, tile.start, len(tile.valid))), tile.start)


def _product(first, second):
    """Returns a batched matrix product over the key heads, summed in float32."""
    return jnp.matmul(first.astype(second.dtype), second, precision=product_precision(second),
                      preferred_element_type=jnp.float32)


def _rows(x):
    """Folds the queries' heads into their rows: `[K, T, R, ...]` to `[K, T R, ...]`."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _mask(seen, repeats):
    return jnp.repeat(seen, repeats, axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, layout, span):
    return _forward(q, k, v, layout, span)[0]


def _forward(q, k, v, layout, span):
    heads, _, repeats, dim = q.shape
    lowest = jnp.finfo(jnp.float32).min

    def tile_step(tile, carry):
        queries = _rows(_take(q, tile.start, span))

        def block_step(place, seen, carry):
            highest, total, mixed = carry
            scores = _product(queries, _take(k, place, span).swapaxes(1, 2))
            scores = jnp.where(_mask(seen, repeats), scores, lowest)
            higher = jnp.maximum(highest, scores.max(-1))
            shrink = jnp.exp(highest - higher)
            weights = jnp.exp(scores - higher[..., None])
            mixed = mixed * shrink[..., None] + _product(weights, _take(v, place, span))
            return higher, total * shrink + weights.sum(-1), mixed

        rows = (heads, span * repeats)
        highest, total, mixed = _each_block(tile, block_step, (
            jnp.full(rows, lowest), jnp.zeros(rows, jnp.float32),
            jnp.zeros((*rows, dim), jnp.float32)))
        by_head = (heads, span, repeats)
        out, normalizer = carry
        return (_put_valid(out, (mixed / total[..., None]).reshape(*by_head, dim), tile),
                _put_valid(normalizer, (highest + jnp.log(total)).reshape(by_head), tile))

    out, normalizer = _each_tile(layout, span, tile_step, (
        jnp.zeros(q.shape, jnp.float32), jnp.zeros(q.shape[:3], jnp.float32)))
    out, normalizer = (checkpoint_name(x, ATTENTION_RESULTS) for x in (out, normalizer))
    return out, (q, k, v, layout, out, normalizer)


def _backward(span, residuals, d_out):
    q, k, v, layout, out, normalizer = residuals
    repeats = q.shape[2]
    # What softmax takes off every cotangent of a query's weights.
    shared = jnp.sum(d_out * out, axis=-1)

    def tile_step(tile, carry):
        queries, d_rows, row_normalizer, row_shared = (
            _rows(_take(x, tile.start, span)) for x in (q, d_out, normalizer, shared))

        def block_step(place, seen, carry):
            d_queries, d_k, d_v = carry
            keys, values = _take(k, place, span), _take(v, place, span)
            scores = _product(queries, keys.swapaxes(1, 2))
            weights = jnp.where(_mask(seen, repeats),
                                jnp.exp(scores - row_normalizer[..., None]), 0.0)
            d_weights = _product(d_rows, values.swapaxes(1, 2))
            d_scores = weights * (d_weights - row_shared[..., None])
            d_queries = d_queries + _product(d_scores, keys)
            d_keys = _product(d_scores.swapaxes(1, 2), queries)
            d_values = _product(weights.swapaxes(1, 2), d_rows.astype(v.dtype))
            return (d_queries, _put(d_k, _take(d_k, place, span) + d_keys, place),
                    _put(d_v, _take(d_v, place, span) + d_values, place))

        d_q, d_k, d_v = carry
        d_queries, d_k, d_v = _each_block(
            tile, block_step, (jnp.zeros(queries.shape, jnp.float32), d_k, d_v))
        shape = (q.shape[0], span, *q.shape[2:])
        return _put_valid(d_q, d_queries.reshape(shape), tile), d_k, d_v

    d_q, d_k, d_v = _each_tile(
        layout, span, tile_step, tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)))
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend.defvjp(_forward, _backward)
