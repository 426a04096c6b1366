"""Packs trees of segments into bins of one static shape."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from flax import struct

from memcalib_jax.models.attention import Segments
from memcalib_jax.models.packed import Packed
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

    def rows(self, values: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Cuts per-batch values `[bins, M]` into one array of the response's length a pair."""
        return [[values[batch][row, offset:offset + length]
                 for batch, row, offset, length in pairs] for pairs in self.places]

    def batched(self, rows: Sequence[Sequence[np.ndarray]], dtype=np.float32) -> list[np.ndarray]:
        """Lays one array a pair out as per-batch `[bins, M]`; 0 elsewhere."""
        values = [np.zeros(batch.targets.shape, dtype) for batch in self.batches]
        for tree_rows, pairs in zip(rows, self.places, strict=True):
            for row, (batch, bin_, offset, length) in zip(tree_rows, pairs, strict=True):
                values[batch][bin_, offset:offset + length] = row
        return values


def bucket(size: int, smallest: int = 1) -> int:
    """Returns the least of smallest * {1, 2, 3, 4, 6, 8, 12, 16, ...} that is >= size."""
    unit = -(-size // smallest)
    power = 1 << max(unit - 1, 0).bit_length()
    return smallest * (power * 3 // 4 if power >= 4 and unit <= power * 3 // 4 else power)


class _Bin:
    """Segments laid end to end; an ancestor that a bin lacks is laid there again."""

    def __init__(self):
        self.starts: dict[tuple[int, int], int] = {}
        self.size = 0

    def lacking(self, trees, tree: int, leaf: int) -> list[int]:
        """Returns the segments that the leaf needs and the bin lacks, ancestors first."""
        ancestors = [index for index, _ in trees[tree].segments[leaf].ancestors]
        return [index for index in (*ancestors, leaf) if (tree, index) not in self.starts]

    def add(self, trees, tree: int, indices: Sequence[int]):
        for index in indices:
            self.starts[tree, index] = self.size
            self.size += len(trees[tree].segments[index].tokens)


def fill_bins(trees: Sequence[Tree], bin_tokens: int) -> list[_Bin]:
    """Fills bins with whole responses and what they need, in the trees' order.

    A response that does not fit with its ancestors into what a bin has left opens the next
    bin; one that exceeds `bin_tokens` by itself gets a bin of its own.
    """
    bins = [_Bin()]
    for tree, content in enumerate(trees):
        for leaf in _depth_first(content):
            lacking = bins[-1].lacking(trees, tree, leaf)
            size = sum(len(content.segments[index].tokens) for index in lacking)
            if bins[-1].size and bins[-1].size + size > bin_tokens:
                bins.append(_Bin())
                lacking = bins[-1].lacking(trees, tree, leaf)
            bins[-1].add(trees, tree, lacking)
    return bins


def _depth_first(tree: Tree) -> list[int]:
    """Returns the distinct leaves, those under one prompt side by side."""
    return sorted(set(tree.leaves), key=lambda leaf: (tree.segments[leaf].ancestors, leaf))


def pack(trees: Sequence[Tree], *, bin_tokens: int, num_bins: int = 1) -> Packing:
    """Packs trees into batches of `num_bins` bins of about `bin_tokens` tokens.

    All batches share one shape, rounded up to few sizes, so that one program serves them all
    and seldom a new one is needed.
    """
    bins = fill_bins(trees, bin_tokens)
    bins += [_Bin() for _ in range(-len(bins) % num_bins)]
    shape = _Shape.of(trees, bins)
    batches = [_batch(trees, bins[first:first + num_bins], shape)
               for first in range(0, len(bins), num_bins)]
    where = {}
    for index, content in enumerate(bins):
        offset = 0
        for tree, leaf in _leaves_in(trees, content):
            length = len(trees[tree].segments[leaf].tokens)
            where[tree, leaf] = (index // num_bins, index % num_bins, offset, length)
            offset += length
    return Packing(
        batches=batches,
        places=[[where[tree, leaf] for leaf in content.leaves]
                for tree, content in enumerate(trees)],
        dense_tokens=sum(tree.dense_tokens for tree in trees),
        tree_tokens=sum(content.size for content in bins),
        padded_tokens=len(bins) * shape.tokens)


def _leaves_in(trees, content: _Bin):
    """Yields the (tree, segment) of a bin's responses in the order of their places."""
    leaves = [set(tree.leaves) for tree in trees]
    return [(tree, index) for tree, index in content.starts if index in leaves[tree]]


# Segments are grouped by their part in the tree: spines see nothing, variants see the spine,
# responses see a spine and maybe a variant.
_SPINE, _VARIANT, _RESPONSE = range(3)


def _parts(trees, content: _Bin) -> list[list[tuple[int, int]]]:
    parts = [[], [], []]
    leaves = set(_leaves_in(trees, content))
    for tree, index in content.starts:
        ancestors = trees[tree].segments[index].ancestors
        part = _RESPONSE if (tree, index) in leaves else _VARIANT if ancestors else _SPINE
        parts[part].append((tree, index))
    return parts


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Static sizes that fit every bin: tokens, targets and (count, query, context) a part."""

    tokens: int
    targets: int
    parts: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, trees, bins):
        counts, queries, contexts, targets = [0] * 3, [0] * 3, [0] * 3, 0
        for content in bins:
            parts = _parts(trees, content)
            targets = max(targets, sum(
                len(trees[t].segments[i].tokens) for t, i in parts[_RESPONSE]))
            for part, members in enumerate(parts):
                segments = [trees[t].segments[i] for t, i in members]
                counts[part] = max(counts[part], len(segments))
                queries[part] = max([queries[part], *(len(s.tokens) for s in segments)])
                contexts[part] = max([contexts[part], *(s.context for s in segments)])
        return cls(
            tokens=bucket(max(content.size for content in bins), 256),
            targets=bucket(targets, 128),
            parts=tuple(
                (bucket(count), bucket(query, 16), bucket(context, 64) if context else 0)
                if count else (0, 0, 0)
                for count, query, context in zip(counts, queries, contexts)))


def _batch(trees, bins: Sequence[_Bin], shape: _Shape) -> ScoredBatch:
    tokens = np.zeros((len(bins), shape.tokens), np.int32)
    positions = np.zeros_like(tokens)
    sources = np.zeros((len(bins), shape.targets), np.int32)
    targets = np.zeros_like(sources)
    counts = np.zeros(len(bins), np.int32)
    for row, content in enumerate(bins):
        for (tree, index), start in content.starts.items():
            segment = trees[tree].segments[index]
            place = slice(start, start + len(segment.tokens))
            tokens[row, place] = segment.tokens
            positions[row, place] = segment.position + np.arange(len(segment.tokens))
        for tree, leaf in _leaves_in(trees, content):
            segment = trees[tree].segments[leaf]
            start = content.starts[tree, leaf]
            parent, seen = segment.ancestors[-1]
            place = slice(counts[row], counts[row] + len(segment.tokens))
            sources[row, place] = start - 1 + np.arange(len(segment.tokens))
            sources[row, counts[row]] = content.starts[tree, parent] + seen - 1
            targets[row, place] = segment.tokens
            counts[row] += len(segment.tokens)
    packed = Packed(tokens, positions, _layout(trees, bins, shape))
    return ScoredBatch(packed, sources, targets, counts)


def _layout(trees, bins: Sequence[_Bin], shape: _Shape) -> tuple[Segments, ...]:
    groups = []
    for part, (count, query_size, context_size) in enumerate(shape.parts):
        if not count:
            continue
        start = np.zeros((len(bins), count), np.int32)
        length = np.zeros_like(start)
        ancestor_start = np.zeros((len(bins), count, max(part, 1)), np.int32)
        ancestor_length = np.zeros_like(ancestor_start)
        for row, content in enumerate(bins):
            for column, (tree, index) in enumerate(_parts(trees, content)[part]):
                segment = trees[tree].segments[index]
                start[row, column] = content.starts[tree, index]
                length[row, column] = len(segment.tokens)
                for level, (ancestor, seen) in enumerate(segment.ancestors):
                    ancestor_start[row, column, level] = content.starts[tree, ancestor]
                    ancestor_length[row, column, level] = seen
        groups.append(Segments(start, length, ancestor_start, ancestor_length,
                               query_size=query_size, context_size=context_size))
    return tuple(groups)
