"""Which segments of which trees lie in which bin."""

import dataclasses
from collections.abc import Iterable, Sequence

from memcalib_jax.scoring.prefix_tree import Tree

# A bin has room for one segment for so many of its tokens.
TOKENS_A_SEGMENT = 16
FEWEST_SEGMENTS = 8
# Sizes from one power of two to the next: at most an eighth of a bin is padding for their sake.
SIZES_AN_OCTAVE = 8
SMALLEST_SIZE = 128


def segment_room(size: int) -> int:
    """Returns how many segments a bin of `size` tokens has room for."""
    return max(FEWEST_SEGMENTS, size // TOKENS_A_SEGMENT)


def bin_sizes(bin_tokens: int) -> tuple[int, ...]:
    """Returns the sizes that bins of at most about `bin_tokens` tokens may have, ascending."""
    step = -(-bin_tokens // (2 * SIZES_AN_OCTAVE))
    sizes: list[int] = []
    while not sizes or SIZES_AN_OCTAVE * step >= SMALLEST_SIZE:
        sizes += [step * n for n in range(SIZES_AN_OCTAVE + 1, 2 * SIZES_AN_OCTAVE + 1)]
        if step % 2:
            break
        step //= 2
    return tuple(sorted(sizes))


@dataclasses.dataclass
class Bin:
    """Segments laid end to end; an ancestor that a bin lacks is laid there again.

    Attributes:
      starts: for each (tree, segment), its first token's place.
      leaves: the (tree, segment) of the responses, in the order of their places.
      size: number of tokens.
    """

    starts: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    leaves: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    size: int = 0

    def add(self, tree: int, content: Tree, leaf: int, most: int) -> bool:
        """Adds a response and what it needs, if the bin then has at most `most` tokens."""
        path = (*(index for index, _ in content.segments[leaf].ancestors), leaf)
        lacking = [index for index in path if (tree, index) not in self.starts]
        tokens = sum(len(content.segments[index].tokens) for index in lacking)
        if (self.size + tokens > most
                or len(self.starts) + len(lacking) > segment_room(most)):
            return False
        for index in lacking:
            self.starts[tree, index] = self.size
            self.size += len(content.segments[index].tokens)
        self.leaves.append((tree, leaf))
        return True


def fill(trees: Sequence[Tree], sizes: Sequence[int], num_bins: int = 1
         ) -> tuple[int, list[Bin]]:
    """Fills bins of one size with whole responses and what they need.

    Of the sizes allowed and of two ways to fill, with trees split where a bin is full or kept
    whole where they fit, it takes the one with the fewest tokens in all, padding included, and of
    those the one with the fewest bins.

    Args:
      trees: what to place.
      sizes: allowed sizes, ascending. If not even the largest has room for some response and its
        ancestors, bins get a larger size that does.
      num_bins: the number of bins is a multiple of it.

    Returns:
      The size, and the bins.
    """
    longest = max((_path_tokens(tree, leaf) for tree in trees for leaf in tree.leaves), default=1)
    fitting = [size for size in sizes if size >= longest]
    if not fitting:
        step = -(-sizes[-1] // (2 * SIZES_AN_OCTAVE))
        fitting = [-(-longest // step) * step]
    # Smaller bins than half the largest repeat ancestors for nothing, unless they hold everything.
    together = sum(tree.tokens for tree in trees) / num_bins
    candidates = [
        (size, bins) for size in fitting if size >= together or 2 * size > fitting[-1]
        for bins in (_in_order(trees, size), _whole(trees, size))]
    for _, bins in candidates:
        bins += [Bin() for _ in range(-len(bins) % num_bins)]
    return min(candidates, key=lambda filled: (filled[0] * len(filled[1]), len(filled[1])))


def _path_tokens(tree: Tree, leaf: int) -> int:
    path = [index for index, _ in tree.segments[leaf].ancestors] + [leaf]
    return sum(len(tree.segments[index].tokens) for index in path)


def _depth_first(tree: Tree) -> list[int]:
    """Returns the distinct leaves, those under one prompt side by side."""
    return sorted(set(tree.leaves), key=lambda leaf: (tree.segments[leaf].ancestors, leaf))


def _in_order(trees: Sequence[Tree], size: int, numbers: Iterable[int] | None = None
              ) -> list[Bin]:
    """Fills one bin after the other in the trees' order, splitting trees."""
    bins = [Bin()]
    for number in range(len(trees)) if numbers is None else numbers:
        for leaf in _depth_first(trees[number]):
            if not bins[-1].add(number, trees[number], leaf, size):
                bins.append(Bin())
                bins[-1].add(number, trees[number], leaf, size)
    return bins


def _whole(trees: Sequence[Tree], size: int) -> list[Bin]:
    """Splits only trees larger than a bin; puts each where it first fits, the largest first."""
    bins: list[Bin] = []
    for number in sorted(range(len(trees)), key=lambda n: -trees[n].tokens):
        for part in _in_order(trees, size, [number]):
            room = segment_room(size) - len(part.starts)
            home = next((bin_ for bin_ in bins if bin_.size + part.size <= size
                         and len(bin_.starts) <= room), None)
            if home is None:
                bins.append(part)
                continue
            home.starts |= {key: home.size + start for key, start in part.starts.items()}
            home.leaves += part.leaves
            home.size += part.size
    return bins or [Bin()]
