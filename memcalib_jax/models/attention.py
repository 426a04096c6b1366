"""Attention among packed segments, each of which sees its ancestors and its own past.

Packed tokens `[bins, N]` are cut into segments: stretches of consecutive tokens. A segment
attends to the leading tokens of each of its ancestors, in order, and causally to itself. A
plain row is a segment without ancestors; a response is a segment whose ancestor is its prompt.
No index crosses a bin, so that bins shard over devices without gathering activations.
"""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Segments:
    """Segments that share one static shape.

    Attributes:
      start: int32 `[bins, S]`, index of a segment's first token in its bin.
      length: int32 `[bins, S]`, number of its tokens, at most `query_size`; 0 for no segment.
      ancestor_start: int32 `[bins, S, A]`, first token of each ancestor, outermost first.
      ancestor_length: int32 `[bins, S, A]`, how many of an ancestor's tokens are seen; their
        sum is at most `context_size`.
      query_size: static room for a segment's own tokens.
      context_size: static room for its ancestors' tokens.
    """

    start: jax.Array
    length: jax.Array
    ancestor_start: jax.Array
    ancestor_length: jax.Array
    query_size: int = struct.field(pytree_node=False)
    context_size: int = struct.field(pytree_node=False)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns softmax(q k / sqrt(d)) v for grouped queries.

    Args:
      q: float `[T, K, R, d]`, R query heads for each of K key heads.
      k, v: `[S, K, d]`; products take their dtype, softmax is float32.
      mask: bool `[T, S]`, true where a query may see a key. A query that may see nothing gets a
        finite value without meaning.

    Returns:
      float32 `[T, K, R, d]`.
    """
    length, num_kv_heads, repeats, head_dim = q.shape
    precision = jax.lax.Precision.HIGHEST if k.dtype == jnp.float32 else None

    def products(first, second):  # one matrix product a key head, the repeats folded into rows
        return jnp.matmul(first.reshape(num_kv_heads, repeats * length, -1), second,
                          precision=precision, preferred_element_type=jnp.float32)

    q = (q * head_dim ** -0.5).astype(k.dtype).transpose(1, 2, 0, 3)
    scores = products(q, k.transpose(1, 2, 0)).reshape(num_kv_heads, repeats, length, -1)
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    highest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - highest)
    mixed = products(weights.astype(v.dtype), v.transpose(1, 0, 2))
    mixed = mixed.reshape(num_kv_heads, repeats, length, head_dim)
    return (mixed / weights.sum(-1, keepdims=True)).transpose(2, 0, 1, 3)


def one_by_one(function, *trees):
    """Maps over the leading axis: in turn on a CPU, whose cache holds one segment's products."""
    if jax.default_backend() == "cpu":
        return jax.lax.map(lambda slices: function(*slices), trees)
    return jax.vmap(function)(*trees)


def key_indices(start, length, ancestor_start, ancestor_length, query_size, context_size):
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


def _attend_group(q, k, v, segments: Segments):
    """Attends a bin's segments of one shape.

    Takes q `[N, K, R, d]`, k and v `[N, K, d]`; returns float32 `[S, T, K, R, d]`.
    """
    query_size, context_size = segments.query_size, segments.context_size
    causal = (jnp.arange(context_size + query_size)[None, :]
              <= jnp.arange(query_size)[:, None] + context_size)

    def one_segment(start, length, ancestor_start, ancestor_length):
        index, valid = key_indices(start, length, ancestor_start, ancestor_length,
                                    query_size, context_size)
        queries = jnp.take(q, start + jnp.arange(query_size), axis=0, mode="clip")
        keys, values = (jnp.take(x, index, axis=0, mode="clip") for x in (k, v))
        return attend(queries, keys, values, valid[None, :] & causal)

    return one_by_one(one_segment, segments.start, segments.length,
                       segments.ancestor_start, segments.ancestor_length)


def packed_attention(q: jax.Array, k: jax.Array, v: jax.Array,
                     groups: tuple[Segments, ...]) -> jax.Array:
    """Attends packed tokens within their segments' trees.

    Args:
      q: float `[bins, N, H, d]`, rotated.
      k, v: `[bins, N, K, d]`, rotated keys and values in the dtype of the products.
      groups: the segments, grouped by static shape; each token belongs to at most one.

    Returns:
      float32 `[bins, N, H, d]`; 0 for tokens of no segment.
    """
    num_tokens, num_kv_heads = q.shape[1], k.shape[2]

    def one_bin(q, k, v, groups):
        q = q.reshape(num_tokens, num_kv_heads, -1, q.shape[-1])
        out = jnp.zeros(q.shape, jnp.float32)
        for segments in groups:
            own = jnp.arange(segments.query_size)
            place = jnp.where(own < segments.length[:, None],
                              segments.start[:, None] + own, num_tokens)
            out = out.at[place].set(_attend_group(q, k, v, segments), mode="drop")
        return out

    return one_by_one(one_bin, q, k, v, groups).reshape(q.shape)
