"""The gated delta rule among packed segments, whose states fork along the tree.

A segment starts from the state that its last ancestor had after the tokens seen of it. States are
known at multiples of `CHUNK` tokens of a segment and at its end: only there may others leave it.
"""

import jax
import jax.numpy as jnp
from flax import struct

from memcalib_jax.models.attention import Segments
from memcalib_jax.models.config import DeltaNet
from memcalib_jax.models.delta_net import (
    CHUNK, Chunks, DeltaState, convolve, run_chunks, solve_chunks, split_heads)


@struct.dataclass
class Layout:
    """How a bin's segments are cut into chunks, and which states they start from.

    Attributes:
      near: int32 `[chunks, before + CHUNK]`, the places of each chunk's tokens and of the ones
        that the convolution sees before them; segment by segment, group by group.
      valid: bool like `near`, whether there is such a token.
      origins: for each group int32 `[S]`, where each segment's first state is among the known
        ones: the one before any token, then those of earlier segments, at all their boundaries.
      last: int32 `[S, before]`, places of the last tokens of the last group's segments, and
      last_valid: bool like it.
      sizes: for each group, its segments and the chunks of each.
    """

    near: jax.Array
    valid: jax.Array
    origins: tuple[jax.Array, ...]
    last: jax.Array
    last_valid: jax.Array
    sizes: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)


def lay_out(groups: tuple[Segments, ...], net: DeltaNet) -> Layout:
    """Returns the layout of every bin, with a leading axis over the bins.

    Args:
      groups: the segments, grouped by static shape; each token belongs to at most one. An
        ancestor lies in an earlier group than its descendants.
      net: its convolution's size.
    """
    before = net.conv_size - 1
    sizes = tuple((group.start.shape[1], -(-group.query_size // CHUNK)) for group in groups)

    def one_bin(groups):
        chunks = []
        for segments, (_, each) in zip(groups, sizes):
            places = jax.vmap(_key_indices, (0, 0, 0, 0, None, None))(
                segments.start, segments.length, segments.ancestor_start,
                segments.ancestor_length, each * CHUNK, before)
            window = jnp.arange(each)[:, None] * CHUNK + jnp.arange(before + CHUNK)
            chunks.append([x[:, window].reshape(-1, before + CHUNK) for x in places])
        near, valid = (jnp.concatenate(parts) for parts in zip(*chunks))
        ends = segments.length[:, None] + jnp.arange(before)
        last, last_valid = (jnp.take_along_axis(x, ends, axis=1) for x in places)
        return Layout(near, valid, _origins(groups, sizes), last, last_valid, sizes)

    return jax.vmap(one_bin)(groups)


def _key_indices(start, length, ancestor_start, ancestor_length, query_size, context_size):
    """Lays what one segment sees out as `[pad | ancestors | own]`.

    Where the ancestors have more than `context_size` tokens, only the last are there.

    Returns int32 indices into the bin and a bool validity, both `[context_size + query_size]`.
    """
    ends = jnp.cumsum(ancestor_length)
    place = jnp.arange(context_size) - (context_size - ends[-1])
    ancestor = jnp.sum(jnp.maximum(place, 0)[:, None] >= ends[:-1], axis=1)
    offset = place - (ends - ancestor_length)[ancestor]
    own = jnp.arange(query_size)
    index = jnp.concatenate([ancestor_start[ancestor] + offset, start + own])
    return index, jnp.concatenate([place >= 0, own < length])


def _origins(groups, sizes):
    starts = []  # of every earlier segment, and where its states begin among the known ones
    origins, known = [], 1
    for segments, (count, each) in zip(groups, sizes):
        seen = segments.ancestor_length
        level = jnp.max(jnp.where(seen > 0, jnp.arange(seen.shape[1]), 0), axis=1)[:, None]
        parent, seen = (jnp.take_along_axis(x, level, axis=1)
                        for x in (segments.ancestor_start, seen))
        origin = jnp.zeros(count, jnp.int32)
        for group, states in starts:
            is_parent = (group.start == parent) & (group.length > 0) & (seen > 0)
            origin += jnp.sum(jnp.where(is_parent, states + -(-seen // CHUNK), 0), axis=1)
        origins.append(origin)
        starts.append((segments, known + jnp.arange(count) * (each + 1)))
        known += count * (each + 1)
    return tuple(origins)


def packed_delta(inputs: jax.Array, log_decay: jax.Array, beta: jax.Array, kernel: jax.Array,
                 layout: Layout, net: DeltaNet) -> tuple[jax.Array, DeltaState]:
    """Mixes packed tokens within their segments' trees.

    Args:
      inputs: float32 `[bins, N, C]`, the convolution's inputs.
      log_decay, beta: float32 `[bins, N, H]`.
      kernel: `[width, C]`.
      layout: of the bins' segments.
      net: numbers and sizes of heads.

    Returns:
      float32 `[bins, N, H, dv]`, 0 for tokens of no segment, and the states after the segments of
      the last group, with leading axes `[bins, S]`.
    """
    num_tokens, before = inputs.shape[1], net.conv_size - 1

    def gather(x, places, valid):
        x = jnp.take(x, places, axis=0, mode="clip")
        return jnp.where(valid[..., None], x, 0.0)

    def one_bin(inputs, log_decay, beta, layout):
        per_token = jnp.concatenate([inputs, log_decay, beta], axis=-1)
        near, decay, write = jnp.split(
            gather(per_token, layout.near, layout.valid),
            [inputs.shape[-1], inputs.shape[-1] + log_decay.shape[-1]], axis=-1)
        q, k, v = split_heads(convolve(near, kernel), net)
        chunks = solve_chunks(q, k, v, decay[:, before:], write[:, before:])
        out, memory = _run_groups(chunks, layout, net)
        place = jnp.where(layout.valid, layout.near, num_tokens)[:, before:]
        mixed = jnp.zeros((num_tokens, *out.shape[2:]), jnp.float32)
        mixed = mixed.at[place].set(out, mode="drop")
        return mixed, DeltaState(memory, gather(inputs, layout.last, layout.last_valid))

    return jax.vmap(one_bin)(inputs, log_decay, beta, layout)


def _run_groups(chunks: Chunks, layout: Layout, net: DeltaNet):
    """Feeds each segment's chunks to the state it starts from, one group after another.

    Returns:
      What is read, float32 `[chunks, CHUNK, H, dv]`, and the last states of the last group's
      segments, float32 `[S, H, dk, dv]`.
    """
    known = jnp.zeros((1, net.num_value_heads, net.key_dim, net.value_dim), jnp.float32)
    outs, first = [], 0
    for origins, (count, each) in zip(layout.origins, layout.sizes):
        own = jax.tree.map(
            lambda x: x[first:first + count * each].reshape(count, each, *x.shape[1:])
            .swapaxes(0, 1), chunks)
        out, states = run_chunks(own, known[origins])
        outs.append(out.swapaxes(0, 1).reshape(-1, *out.shape[2:]))
        known = jnp.concatenate([known, states.swapaxes(0, 1).reshape(-1, *known.shape[1:])])
        first += count * each
    return jnp.concatenate(outs), states[-1]
