"""Predefined counts: how many blocks a sample has, how many atoms each, and where they stand."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayoutLimits:
    """Bounds of the counts, which are drawn evenly for each sample from its id and the seed.

    Attributes:
      min_blocks, max_blocks: blocks of a sample.
      min_atoms, max_atoms: atoms of a block.
      seed: another one draws other counts.

    Raises:
      ValueError: the bounds are none.
    """

    min_blocks: int = 3
    max_blocks: int = 6
    min_atoms: int = 2
    max_atoms: int = 6
    seed: int = 0

    def __post_init__(self):
        for least, most, what in ((self.min_blocks, self.max_blocks, "blocks"),
                                  (self.min_atoms, self.max_atoms, "atoms")):
            if not 1 <= least <= most:
                raise ValueError(f"min_{what}={least} and max_{what}={most} must be at least 1, "
                                 "and the first no more than the second")


def block_sizes(sample_id: str, num_source: int, limits: LayoutLimits) -> tuple[int, ...] | None:
    """Draws the number of atoms of each block, with room for the source's and one hard distractor.

    Blocks are added while there is no room; None where even the largest layout has none.
    """
    draw = _random(sample_id, limits.seed, "sizes")
    sizes = [draw.randint(limits.min_atoms, limits.max_atoms)
             for _ in range(draw.randint(limits.min_blocks, limits.max_blocks))]
    while sum(sizes) < num_source + 1 and len(sizes) < limits.max_blocks:
        sizes.append(draw.randint(limits.min_atoms, limits.max_atoms))
    for place in range(len(sizes)):
        missing = num_source + 1 - sum(sizes)
        sizes[place] += max(0, min(missing, limits.max_atoms - sizes[place]))
    return tuple(sizes) if sum(sizes) >= num_source + 1 else None


def interleave(sample_id: str, source: Sequence, added: Sequence, limits: LayoutLimits) -> list:
    """Mixes distractors among the source's atoms; each of the two keeps its order."""
    draw = _random(sample_id, limits.seed, "places")
    length = len(source) + len(added)
    places = set(draw.sample(range(length), len(source)))
    source, added = iter(source), iter(added)
    return [next(source) if place in places else next(added) for place in range(length)]


def _random(sample_id: str, seed: int, purpose: str) -> random.Random:
    return random.Random(hashlib.sha256(f"{seed}/{purpose}/{sample_id}".encode()).digest())
