"""The endless, resumable stream of prompts for training."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import grain

Item = TypeVar("Item")


class PromptBatches(Generic[Item]):
    """Iterates over batches of distinct items; see `prompt_batches`."""

    def __init__(self, items: Sequence[Item], num_prompts: int, seed: int):
        self._items, self._num_prompts, self._seed = items, num_prompts, seed
        self._stream = grain.MapDataset.range(len(items)).seed(seed).shuffle().repeat()
        self._position = 0
        self._deferred: list[int] = []

    def __iter__(self) -> "PromptBatches[Item]":
        return self

    def __next__(self) -> list[Item]:
        batch, deferred, waiting = [], [], list(self._deferred)
        while len(batch) < self._num_prompts:
            if waiting:
                index = waiting.pop(0)
            else:
                index = int(self._stream[self._position])
                self._position += 1
            (deferred if index in batch else batch).append(index)
        self._deferred = deferred + waiting
        return [self._items[index] for index in batch]

    def get_state(self) -> dict:
        """Returns what `set_state` needs to go on from here; it survives JSON."""
        return {
            "num_items": len(self._items),
            "seed": self._seed,
            "position": self._position,
            "deferred": list(self._deferred),
        }

    def set_state(self, state: dict) -> None:
        """Goes on from where `state` was taken.

        Raises:
          ValueError: the state was taken with another seed or another number of items.
        """
        for name, mine in (("num_items", len(self._items)), ("seed", self._seed)):
            if state[name] != mine:
                raise ValueError(
                    f"the saved data position has {name} {state[name]}, but this run has {mine}; "
                    "resume with the same data, limits and seed, or start a new run"
                )
        self._position, self._deferred = state["position"], list(state["deferred"])


def prompt_batches(
    records: Sequence[Item], *, num_prompts: int, seed: int
) -> PromptBatches[Item]:
    """Makes an endless iterator over lists of `num_prompts` distinct members of `records`.

    Every epoch is a new permutation, made from `seed` and the epoch. Batches run across the border
    of two epochs, so that no record is dropped; a record that the next epoch would bring a second
    time into such a batch waits for the following one. Its `get_state` and `set_state` save and
    restore the place in the stream, in any epoch.

    Raises:
      ValueError: there are fewer records than `num_prompts`, `num_prompts` is not positive, or
        `seed` is negative.
    """
    if num_prompts < 1:
        raise ValueError(f"num_prompts must be at least 1, not {num_prompts}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, but is {seed}")
    if len(records) < num_prompts:
        raise ValueError(
            f"{len(records)} records cannot fill a batch of {num_prompts} different prompts; "
            "lower num_prompts or give more records"
        )
    return PromptBatches(records, num_prompts, seed)
