"""Attention among packed segments, each of which sees its ancestors and its own past.

Packed tokens `[bins, N]` are cut into segments: stretches of consecutive tokens. A segment
attends to the leading tokens of each of its ancestors, in order, and causally to itself. A
plain row is a segment without ancestors; a response is a segment whose ancestor is its prompt.
No index crosses a bin, so that bins shard over devices without gathering activations.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from memcalib_jax.models.on_mesh import on_shards, platform, rows_spec, tensor_spec
from memcalib_jax.models.pallas_attention import attend_blocks
from memcalib_jax.models.tile_attention import attend_tiles

# What attention is made of: TPU kernels (on other devices interpreted, which is for checks), XLA's
# own operations, or kernels where the devices are TPUs. Enter it around what is traced or called:
# `with attention_form("pallas"):`.
FORMS = ("auto", "xla", "pallas")
attention_form = jax.make_user_context("auto")


@struct.dataclass
class Segments:
    """Segments of a bin.

    Attributes:
      start: int32 `[bins, S]`, index of a segment's first token in its bin.
      length: int32 `[bins, S]`, number of its tokens, at most `query_size`; 0 for no segment.
      ancestor_start: int32 `[bins, S, A]`, first token of each ancestor, outermost first.
      ancestor_length: int32 `[bins, S, A]`, how many of an ancestor's tokens are seen.
      query_size: static bound of the lengths: delta net layers make room for as many tokens of
        every segment.
    """

    start: jax.Array
    length: jax.Array
    ancestor_start: jax.Array
    ancestor_length: jax.Array
    query_size: int = struct.field(pytree_node=False)


def packed_attention(q: jax.Array, k: jax.Array, v: jax.Array,
                     groups: tuple[Segments, ...]) -> jax.Array:
    """Attends packed tokens within their segments' trees.

    Args:
      q: float `[bins, N, H, d]`, rotated.
      k, v: `[bins, N, K, d]`, rotated keys and values in the dtype of the products.
      groups: the segments; each token belongs to at most one.

    Returns:
      float32 `[bins, N, H, d]`; 0 for tokens of no segment.
    """
    by_key_head = q.reshape(*k.shape[:3], -1, q.shape[-1])
    bins = rows_spec(q.shape[0])
    heads, layout = PartitionSpec(bins, None, tensor_spec(k.shape[2])), PartitionSpec(bins)
    on_tpu = platform() == "tpu"
    form = attention_form.value
    if form == "auto":
        form = "pallas" if on_tpu else "xla"

    def attend(q, k, v, groups):
        segments = _one_group(groups)
        if form == "pallas":
            return attend_blocks(q, k, v, *segments, interpret=not on_tpu)
        return over_bins(attend_tiles, q, k, v, *segments)

    attend = on_shards(attend, (heads, heads, heads, layout), heads, check_vma=False)
    return attend(by_key_head, k, v, groups).reshape(q.shape)


def _one_group(groups):
    """Returns start, length and ancestors of the segments of all groups."""
    depth = max(group.ancestor_start.shape[-1] for group in groups)

    def as_deep(x):
        return jnp.pad(x, ((0, 0), (0, 0), (0, depth - x.shape[-1])))

    fields = [(group.start, group.length, as_deep(group.ancestor_start),
               as_deep(group.ancestor_length)) for group in groups]
    return [jnp.concatenate(parts, axis=1) for parts in zip(*fields)]


def over_bins(function, *trees):
    """Maps over the leading axis: in turn on a CPU, whose loops then end where each bin's do."""
    if jax.tree.leaves(trees)[0].shape[0] == 1:
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], trees)))
    if platform() == "cpu":
        return jax.lax.map(lambda slices: function(*slices), trees)
    return jax.vmap(function)(*trees)
