"""Attention of packed bins by TPU kernels, which hold the scores of a tile and a block at a time.

A bin is cut into tiles of queries and blocks of keys. Which blocks hold keys that some query of a
tile sees is listed first; a kernel goes through a tile's list (for the cotangents of keys and
values, through a block's list of tiles) and keeps softmax's running maximum and sums in float32 on
the chip. What lies outside the lists is neither read nor computed.

Inside, queries lie along the last axis, those of a tile's R heads side by side ("rows"), and keys
along the one before it: scores are `[block, rows]`, and what softmax keeps of a query is one number
in a row vector, which is how the vector unit holds it without padding.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memcalib_jax.models.layers import product_precision
from memcalib_jax.models.tile_attention import ATTENTION_RESULTS

LANES = 128  # of a TPU's vectors: what last axes are multiples of
# Of a block and a tile, whose scores then take 2 MiB, with keys of 128 in bfloat16.
MOST_KEYS, MOST_ROWS, KEY_BYTES = 512, 1024, 256
# Takes a score's weight to 0; finite, so that differences of such scores are numbers.
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


class Cut(NamedTuple):
    """The queries of a tile, the keys of a block, and whether kernels are interpreted."""

    tile: int
    block: int
    interpret: bool


def spans_of(size: int, repeats: int, key_bytes: int) -> tuple[int, int]:
    """Returns a tile's queries and a block's keys, both powers of two.

    Args:
      size: tokens of a bin.
      repeats: R, query heads of a key head.
      key_bytes: bytes of a key; wide ones leave less room for scores.
    """
    most = min(max(1 << (size - 1).bit_length(), LANES), MOST_KEYS)
    tile = min(_power(max(MOST_ROWS // repeats, LANES)), most)
    scores = MOST_ROWS * MOST_KEYS * KEY_BYTES // max(key_bytes, KEY_BYTES)
    return tile, min(_power(max(scores // (tile * repeats), LANES)), most)


def _power(number):
    """Returns the largest power of two that is not larger."""
    return 1 << number.bit_length() - 1


def attend_blocks(q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, length: jax.Array,
                  ancestor_start: jax.Array, ancestor_length: jax.Array, *,
                  interpret: bool = False) -> jax.Array:
    """Returns softmax(q k / sqrt(d)) v, each query over what its segment lets it see.

    Args:
      q: float `[bins, N, K, R, d]`, R query heads for each of K key heads.
      k, v: `[bins, N, K, d]`; products take their dtype, sums and softmax are float32.
      start, length: int32 `[bins, S]`, each segment's first token and number of tokens; a token
        belongs to at most one segment.
      ancestor_start, ancestor_length: int32 `[bins, S, A]`, what is seen before a segment's own.
      interpret: run the kernels' operations one by one, on any device, as checks do.

    Returns:
      float32 `[bins, N, K, R, d]`, differentiable in q, k and v; 0 for tokens of no segment, whose
      inputs have no influence as long as they are finite.
    """
    size = q.shape[1]
    cut = Cut(*spans_of(size, q.shape[3], k.shape[3] * k.dtype.itemsize), interpret)
    to_whole_blocks = [(0, 0), (0, -size % max(cut.tile, cut.block))]
    q, k, v = (jnp.pad(x, to_whole_blocks + [(0, 0)] * (x.ndim - 2))
               for x in ((q * q.shape[-1] ** -0.5).astype(k.dtype), k, v))
    lows, highs = stretches(q.shape[1], start, length, ancestor_start, ancestor_length)
    out = _attend(_as_rows(q, cut.tile), k.swapaxes(1, 2), v.swapaxes(1, 2),
                  (lows, highs, visited(lows, highs, cut)), cut)
    return _from_rows(out, cut.tile, q.shape)[:, :size]


def stretches(size: int, start: jax.Array, length: jax.Array, ancestor_start: jax.Array,
              ancestor_length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the keys each token sees, ancestors' first: those from a low up to before a high.

    Args:
      size: N, how many places bins have.
      start, length, ancestor_start, ancestor_length: the segments, as in `attend_blocks`.

    Returns:
      Lows and highs, int32 `[bins, A + 1, N]` each, equal where nothing is seen.
    """
    place = jnp.arange(size, dtype=jnp.int32)
    inside = (place >= start[..., None]) & (place < (start + length)[..., None])

    def of_tokens(values):  # [bins, S, ...] of segments; a sum, as no token belongs to two
        return jnp.sum(jnp.where(jnp.expand_dims(inside, 2), values[..., None], 0), axis=1)

    lows = jnp.concatenate([ancestor_start, start[..., None]], axis=-1)
    highs = of_tokens(ancestor_start + ancestor_length)
    own = jnp.where(jnp.any(inside, axis=1, keepdims=True), place + 1, 0)
    return of_tokens(lows), jnp.concatenate([highs, own], axis=1)


def visited(lows: jax.Array, highs: jax.Array, cut: Cut) -> jax.Array:
    """Returns which tiles see something of which blocks: bool `[bins, tiles, blocks]`."""
    first = jnp.arange(0, lows.shape[-1], cut.block)
    lows, highs = lows[..., None], highs[..., None]
    sees = jnp.maximum(lows, first) < jnp.minimum(highs, first + cut.block)
    return jnp.any(sees.reshape(*lows.shape[:2], -1, cut.tile, len(first)), axis=(1, 3))


def _listed(chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the true places of each row of `chosen`, and how many they are, as flat int32.

    A list goes on with its last place, as a step at the place of the step before loads nothing.
    """
    counts = jnp.sum(chosen, axis=-1, keepdims=True, dtype=jnp.int32)
    order = jnp.argsort(~chosen, axis=-1, stable=True).astype(jnp.int32)
    within = jnp.minimum(jnp.arange(chosen.shape[-1]), jnp.maximum(counts - 1, 0))
    # Flat, as arrays of several axes are padded in the scalar memory.
    return jnp.take_along_axis(order, within, axis=-1).ravel(), counts.ravel()


def _as_rows(x, tile):
    """Returns `[bins, N, K, R, d]` as `[bins, K, d, N R]`: tile after tile, head after head."""
    bins, size, heads, repeats, dim = x.shape
    tiles = x.reshape(bins, size // tile, tile, heads, repeats, dim)
    return tiles.transpose(0, 3, 5, 1, 4, 2).reshape(bins, heads, dim, size * repeats)


def _from_rows(x, tile, shape):
    """Returns what `_as_rows` made of an array of a shape in that shape."""
    bins, size, heads, repeats, dim = shape
    tiles = x.reshape(bins, heads, dim, size // tile, repeats, tile)
    return tiles.transpose(0, 3, 5, 1, 4, 2).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, layout, cut):
    return _forward(q, k, v, layout, cut)[0]


def _forward(q, k, v, layout, cut):
    numbers = jax.ShapeDtypeStruct((*q.shape[:2], 1, q.shape[-1]), jnp.float32)
    out, normalizer = _run(
        _forward_kernel, (q, k, v), layout, cut, outputs=(q, numbers),
        scratch=[pltpu.VMEM((1, _rows_of(q, layout, cut)), jnp.float32)] * 2)
    out, normalizer = (checkpoint_name(x, ATTENTION_RESULTS) for x in (out, normalizer))
    return out, (q, k, v, layout, out, normalizer)


def _backward(cut, residuals, d_out):
    q, k, v, layout, out, normalizer = residuals
    # What softmax takes off every cotangent of a query's weights.
    shared = jnp.sum(d_out * out, axis=2, keepdims=True)
    inputs = (q, k, v, d_out.astype(v.dtype), normalizer, shared)
    d_q, = _run(_d_queries_kernel, inputs, layout, cut, outputs=(q,))
    d_k, d_v = _run(_d_keys_kernel, inputs, layout, cut, outputs=(k, v), by_block=True)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def _rows_of(q, layout, cut):
    """Returns the rows of a tile: its queries times their heads."""
    return cut.tile * q.shape[-1] // layout[0].shape[-1]


def _run(kernel, inputs, layout, cut, *, outputs, by_block=False, scratch=()):
    """Calls a kernel for each tile and the blocks listed for it, or the other way round.

    Args:
      kernel: takes the lists, its part of lows and highs, of the inputs and of the outputs, and
        the scratch memory.
      inputs: q by rows, `[bins, K, d, N R]`; k and v by keys, `[bins, K, N, d]`; further ones by
        rows, `[bins, K, ..., N R]`.
      layout: lows, highs and what is `visited`.
      cut: how bins are cut.
      outputs: arrays like those that are made, in float32; by keys if `by_block`, else by rows.
      by_block: the lists are those of blocks.
      scratch: shapes of memory that lasts from step to step.
    """
    lows, highs, chosen = layout
    q, k, v, *more = inputs
    rows = _rows_of(q, layout, cut)
    places, counts = _listed(chosen.swapaxes(1, 2) if by_block else chosen)
    owners, room = chosen.shape[:0:-1] if by_block else chosen.shape[1:]

    def own(bin_, head, owner, step, places, counts):
        return owner

    def listed(bin_, head, owner, step, places, counts):
        return places[(bin_ * owners + owner) * room + step]

    tile_of, block_of = (listed, own) if by_block else (own, listed)

    def by_rows(x):
        return pl.BlockSpec((None, None, x.shape[2], rows),
                            lambda *at: (at[0], at[1], 0, tile_of(*at)))

    def by_keys(x):
        return pl.BlockSpec((None, None, cut.block, x.shape[3]),
                            lambda *at: (at[0], at[1], block_of(*at), 0))

    by_queries = pl.BlockSpec((None, lows.shape[1], cut.tile),
                              lambda *at: (at[0], 0, tile_of(*at)))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(*q.shape[:2], owners, room), scratch_shapes=scratch,
            in_specs=[by_queries, by_queries, by_rows(q), by_keys(k), by_keys(v),
                      *map(by_rows, more)],
            out_specs=tuple(map(by_keys if by_block else by_rows, outputs))),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in outputs),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=cut.interpret, name=kernel.__name__.strip("_"),
    )(places, counts, lows, highs, *inputs)


def _forward_kernel(places, counts, lows, highs, q, k, v, out, normalizer, highest, total):
    step = _step(places, counts)

    @pl.when(step.is_first)
    def _():
        out[...] = jnp.zeros_like(out)
        total[...] = jnp.zeros_like(total)
        highest[...] = jnp.full_like(highest, HIDDEN / 2)  # above all that is hidden

    @pl.when(step.is_listed)
    def _():
        scores = _scores(q, k, lows, highs, step.listed)
        higher = jnp.maximum(highest[...], jnp.max(scores, axis=0, keepdims=True))
        shrink = jnp.exp(highest[...] - higher)
        weights = jnp.exp(scores - higher)
        out[...] = out[...] * shrink + _product(v[...], weights, (0, 0))
        total[...] = total[...] * shrink + jnp.sum(weights, axis=0, keepdims=True)
        highest[...] = higher

    @pl.when(step.is_last)
    def _():
        some = jnp.where(total[...] > 0, total[...], 1.0)
        out[...] = out[...] / some
        normalizer[...] = highest[...] + jnp.log(some)


def _d_queries_kernel(places, counts, lows, highs, q, k, v, d_out, normalizer, shared, d_q):
    step = _step(places, counts)

    @pl.when(step.is_first)
    def _():
        d_q[...] = jnp.zeros_like(d_q)

    @pl.when(step.is_listed)
    def _():
        scores = _scores(q, k, lows, highs, step.listed)
        _, d_scores = _weights(scores, v, d_out, normalizer, shared)
        d_q[...] += _product(k[...], d_scores, (0, 0))


def _d_keys_kernel(places, counts, lows, highs, q, k, v, d_out, normalizer, shared, d_k, d_v):
    step = _step(places, counts)

    @pl.when(step.is_first)
    def _():
        d_k[...] = jnp.zeros_like(d_k)
        d_v[...] = jnp.zeros_like(d_v)

    @pl.when(step.is_listed)
    def _():
        scores = _scores(q, k, lows, highs, step.owner)
        weights, d_scores = _weights(scores, v, d_out, normalizer, shared)
        d_k[...] += _product(d_scores, q[...], (1, 1))
        d_v[...] += _product(weights, d_out[...], (1, 1))


class Step(NamedTuple):
    """A step through a list: whose list it is, and the place that the step takes."""

    owner: jax.Array
    listed: jax.Array
    is_listed: jax.Array
    is_first: jax.Array
    is_last: jax.Array


def _step(places, counts):
    """Returns the step that a kernel is at in its grid of bins, heads, lists and their places."""
    bin_, owner, step = (pl.program_id(axis) for axis in (0, 2, 3))
    row, room = bin_ * pl.num_programs(2) + owner, pl.num_programs(3)
    return Step(owner, places[row * room + step], step < counts[row], step == 0, step == room - 1)


def _product(first, second, axes):
    """Returns the product over one axis of each, in the narrower dtype, summed in float32."""
    dtype = min(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize)
    first, second = first.astype(dtype), second.astype(dtype)
    return jax.lax.dot_general(
        first, second, (((axes[0],), (axes[1],)), ((), ())), precision=product_precision(second),
        preferred_element_type=jnp.float32)


def _scores(q, k, lows, highs, place):
    """Returns the scores `[block, rows]` of the block at `place`, lowered where nothing is seen."""
    scores = _product(k[...], q[...], (1, 0))
    tile = lows.shape[1]
    key = jax.lax.broadcasted_iota(jnp.int32, (k.shape[0], tile), 0) + place * k.shape[0]
    seen = functools.reduce(jnp.logical_or, (
        (key >= lows[i:i + 1, :]) & (key < highs[i:i + 1, :]) for i in range(lows.shape[0])))
    penalty = jnp.where(seen, 0.0, HIDDEN)
    return scores + jnp.concatenate([penalty] * (scores.shape[1] // tile), axis=1)


def _weights(scores, v, d_out, normalizer, shared):
    """Returns a block's softmax weights and the cotangents of its scores, `[block, rows]`."""
    weights = jnp.exp(scores - normalizer[...])
    return weights, weights * (_product(v[...], d_out[...], (1, 0)) - shared[...])
