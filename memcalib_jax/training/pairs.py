"""(Prompt, response) pairs packed for one forward."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from memcalib_jax.models import ModelConfig
from memcalib_jax.scoring import ScoringGroup
from memcalib_jax.scoring.counterfactual import pack_groups
from memcalib_jax.scoring.packing import Packing


class Pair(NamedTuple):
    """Token ids of a prompt and of a response to it, none empty."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


def pack_pairs(config: ModelConfig, pairs: Sequence[Pair], sizes: Sequence[int]) -> Packing:
    """Packs pairs so that equal prompts are computed once.

    Args:
      config: the model's shape.
      pairs: what to pack; a pair that is there twice counts twice.
      sizes: sizes that bins may have, see `pack`.

    Returns:
      A packing whose `places` hold one list: the pairs' places, in the order given.
    """
    members = collections.defaultdict(list)
    for index, pair in enumerate(pairs):
        members[pair.prompt].append(index)
    packing = pack_groups(config, [
        ScoringGroup([prompt], [pairs[i].response for i in indices],
                     [(0, g) for g in range(len(indices))])
        for prompt, indices in members.items()], sizes, keep_repeats=True)
    places = {index: place for indices, rows in zip(members.values(), packing.places, strict=True)
              for index, place in zip(indices, rows, strict=True)}
    return dataclasses.replace(packing, places=[[places[i] for i in range(len(pairs))]])
