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
      q: float `[..., T, K, R, d]`, R query heads for each of K key heads.
      k, v: `[..., S, K, d]`; products take their dtype, softmax is float32.
      mask: bool `[..., T, S]`, true where a query may see a key. A query that may see nothing
        gets a finite value without meaning.

    Returns:
      float32 `[..., T, K, R, d]`.
    """
    precision = jax.lax.Precision.HIGHEST if k.dtype == jnp.float32 else None
    q = (q * q.shape[-1] ** -0.5).astype(k.dtype)
    scores = jnp.einsum("...tkrd,...skd->...krts", q, k, precision=precision,
                        preferred_element_type=jnp.float32)
    scores = jnp.where(mask[..., None, None, :, :], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("...krts,...skd->...tkrd", weights, v, precision=precision,
                      preferred_element_type=jnp.float32)


def _key_indices(start, length, ancestor_start, ancestor_length, query_size, context_size):
    """Lays one segment's keys out as `[pad | ancestors | own]`.

    Returns int32 indices into the bin and a bool validity, both `[context_size + query_size]`.
    """
    ends = jnp.cumsum(ancestor_length)
    seen = ends[-1]
    place = jnp.arange(context_size) - (context_size - seen)
    ancestor = jnp.searchsorted(ends, jnp.maximum(place, 0), side="right")
    ancestor = jnp.minimum(ancestor, ends.shape[0] - 1)
    offset = place - (ends - ancestor_length)[ancestor]
    own = jnp.arange(query_size)
    index = jnp.concatenate([ancestor_start[ancestor] + offset, start + own])
    return index, jnp.concatenate([place >= 0, own < length])


def _attend_bin(q, k, v, segments: Segments):
    """Attends one bin: q `[N, H, d]`, k and v `[N, K, d]`; returns float32 `[S, T, H, d]`."""
    query_size, context_size = segments.query_size, segments.context_size
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]

    def one_layout(start, length, ancestor_start, ancestor_length):
        index, valid = _key_indices(start, length, ancestor_start, ancestor_length,
                                    query_size, context_size)
        causal = (jnp.arange(context_size + query_size)[None, :]
                  <= jnp.arange(query_size)[:, None] + context_size)
        return jnp.clip(index, 0, num_tokens - 1), valid[None, :] & causal

    key_index, mask = jax.vmap(one_layout)(
        segments.start, segments.length, segments.ancestor_start, segments.ancestor_length)
    query_index = jnp.clip(segments.start[:, None] + jnp.arange(query_size), 0, num_tokens - 1)
    queries = q[query_index].reshape(
        *query_index.shape, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mixed = attend(queries, k[key_index], v[key_index], mask)
    return mixed.reshape(*query_index.shape, num_heads, head_dim)


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
    num_tokens = q.shape[1]

    def one_bin(q, k, v, groups):
        out = jnp.zeros(q.shape, jnp.float32)
        for segments in groups:
            own = jnp.arange(segments.query_size)
            place = jnp.where(own < segments.length[:, None],
                              segments.start[:, None] + own, num_tokens)
            out = out.at[place].set(_attend_bin(q, k, v, segments), mode="drop")
        return out

    return jax.vmap(one_bin)(q, k, v, groups)
