"""Packs trees of segments into bins of one static shape."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from flax import struct

from memcalib_jax.models.attention import Segments
from memcalib_jax.models.packed import Packed
from memcalib_jax.scoring.bins import Bin, fill, segment_room
from memcalib_jax.scoring.prefix_tree import Tree


@struct.dataclass
class ScoredBatch:
    """Packed bins and the response tokens whose log-probs are wanted.

    Attributes:
      packed: the tokens and their attention layout.
      sources: int32 `[bins, M]`, place in the bin whose hidden state predicts the target.
      targets: int32 `[bins, M]`, token ids; places beyond `counts` hold 0.
      counts: int32 `[bins]`, number of targets in each bin.
    """

    packed: Packed
    sources: jax.Array
    targets: jax.Array
    counts: jax.Array


@dataclasses.dataclass(frozen=True)
class Packing:
    """Batches of equal shape, and where each pair's targets lie in them.

    Attributes:
      batches: arrays on the host, one `ScoredBatch` a device call.
      places: for each tree, for each of its pairs: (batch, bin, offset, length) into
        `[bins, M]`.
      dense_tokens, tree_tokens, padded_tokens: tokens of dense rows, of the trees (ancestors
        repeated in several bins counted each time), and of all bins with their padding.
    """

    batches: list[ScoredBatch]
    places: list[list[tuple[int, int, int, int]]]
    dense_tokens: int
    tree_tokens: int
    padded_tokens: int

    @property
    def bin_size(self) -> int:
        """Tokens of a bin, padding included."""
        return self.batches[0].packed.tokens.shape[1]

    def rows(self, values: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Cuts per-batch `[bins, M, ...]` into one array of the response's length a pair."""
        return [[values[batch][row, offset:offset + length]
                 for batch, row, offset, length in pairs] for pairs in self.places]

    def batched(self, rows: Sequence[Sequence[np.ndarray]], dtype=np.float32) -> list[np.ndarray]:
        """Lays one array `[length, ...]` a pair out as per-batch `[bins, M, ...]`; 0 elsewhere."""
        more = next((row.shape[1:] for tree_rows in rows for row in tree_rows), ())
        values = [np.zeros((*batch.targets.shape, *more), dtype) for batch in self.batches]
        for tree_rows, pairs in zip(rows, self.places, strict=True):
            for row, (batch, bin_, offset, length) in zip(tree_rows, pairs, strict=True):
                values[batch][bin_, offset:offset + length] = row
        return values


def bucket(size: int, smallest: int = 1) -> int:
    """Returns the least of smallest * {1, 2, 3, 4, 6, 8, 12, 16, ...} that is >= size."""
    unit = -(-size // smallest)
    power = 1 << max(unit - 1, 0).bit_length()
    return smallest * (power * 3 // 4 if power >= 4 and unit <= power * 3 // 4 else power)


def pack(trees: Sequence[Tree], sizes: Sequence[int], *, num_bins: int = 1,
         by_level: bool = False) -> Packing:
    """Packs trees into batches of `num_bins` bins of one size.

    The bins' size says the shape of every array, so that a program serves all batches of a size.

    Args:
      trees: what to pack.
      sizes: the sizes that bins may have, ascending; see `bin_sizes`.
      num_bins: bins of a device call.
      by_level: group the segments by their level in the tree, ancestors first, with room that
        follows the lengths, as delta net layers need. More shapes occur.
    """
    size, bins = fill(trees, sizes, num_bins)
    lay_out = _levels if by_level else _one_group
    segments = lay_out(trees, bins, size)
    batches, where = [], {}
    for first in range(0, len(bins), num_bins):
        chosen = slice(first, first + num_bins)
        batches.append(_batch(trees, bins[chosen], size,
                              jax.tree.map(lambda x: x[chosen], segments)))
    for index, content in enumerate(bins):
        offset = 0
        for tree, leaf in content.leaves:
            length = len(trees[tree].segments[leaf].tokens)
            where[tree, leaf] = (index // num_bins, index % num_bins, offset, length)
            offset += length
    return Packing(
        batches=batches,
        places=[[where[tree, leaf] for leaf in content.leaves]
                for tree, content in enumerate(trees)],
        dense_tokens=sum(tree.dense_tokens for tree in trees),
        tree_tokens=sum(content.size for content in bins),
        padded_tokens=len(bins) * size)


def _batch(trees, bins: Sequence[Bin], size: int, segments) -> ScoredBatch:
    shape = len(bins), size
    tokens, positions, sources, targets = (np.zeros(shape, np.int32) for _ in range(4))
    counts = np.zeros(len(bins), np.int32)
    for row, content in enumerate(bins):
        for (tree, index), start in content.starts.items():
            segment = trees[tree].segments[index]
            place = slice(start, start + len(segment.tokens))
            tokens[row, place] = segment.tokens
            positions[row, place] = segment.position + np.arange(len(segment.tokens))
        for tree, leaf in content.leaves:
            segment = trees[tree].segments[leaf]
            start = content.starts[tree, leaf]
            parent, seen = segment.ancestors[-1]
            place = slice(counts[row], counts[row] + len(segment.tokens))
            sources[row, place] = start - 1 + np.arange(len(segment.tokens))
            sources[row, counts[row]] = content.starts[tree, parent] + seen - 1
            targets[row, place] = segment.tokens
            counts[row] += len(segment.tokens)
    return ScoredBatch(Packed(tokens, positions, segments), sources, targets, counts)


# Spines see nothing, variants and responses under the full prompt see the spine, responses under
# a variant see both.
MOST_ANCESTORS = 2


def _one_group(trees, bins: Sequence[Bin], size: int) -> tuple[Segments, ...]:
    members = [list(content.starts) for content in bins]
    return (_segments(trees, bins, members, segment_room(size), size),)


def _levels(trees, bins: Sequence[Bin], size: int) -> tuple[Segments, ...]:
    """Groups spines, variants and responses: a segment's ancestors are in earlier groups."""
    def level(tree, index):
        if (tree, index) in leaves:
            return 2
        return 1 if trees[tree].segments[index].ancestors else 0

    leaves = {leaf for content in bins for leaf in content.leaves}
    groups = []
    for number in range(3):
        members = [[key for key in content.starts if level(*key) == number] for content in bins]
        lengths = [len(trees[tree].segments[index].tokens)
                   for keys in members for tree, index in keys]
        if lengths:
            groups.append(_segments(trees, bins, members, bucket(max(map(len, members))),
                                    bucket(max(lengths), 16)))
    return tuple(groups)


def _segments(trees, bins, members, room: int, query_size: int) -> Segments:
    start = np.zeros((len(bins), room), np.int32)
    length = np.zeros_like(start)
    ancestor_start = np.zeros((len(bins), room, MOST_ANCESTORS), np.int32)
    ancestor_length = np.zeros_like(ancestor_start)
    for row, (content, keys) in enumerate(zip(bins, members, strict=True)):
        for column, (tree, index) in enumerate(keys):
            segment = trees[tree].segments[index]
            start[row, column] = content.starts[tree, index]
            length[row, column] = len(segment.tokens)
            for level, (ancestor, seen) in enumerate(segment.ancestors):
                ancestor_start[row, column, level] = content.starts[tree, ancestor]
                ancestor_length[row, column, level] = seen
    return Segments(start, length, ancestor_start, ancestor_length, query_size=query_size)
