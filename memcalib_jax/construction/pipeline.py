"""Steps that samples pass in order, many at once, resumable after any; and the six of B.1."""

import asyncio
import functools
import pathlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from memcalib_jax.api import ChatError, Stopped
from memcalib_jax.construction.annotation import annotate
from memcalib_jax.construction.assurance import assure
from memcalib_jax.construction.composition import compose
from memcalib_jax.construction.decisions import Asker, Rejected
from memcalib_jax.construction.derivation import derive
from memcalib_jax.construction.distractors import distract
from memcalib_jax.construction.journal import FAILED, KEPT, REJECTED, Journal
from memcalib_jax.construction.layout import LayoutLimits
from memcalib_jax.construction.screening import screen

STAGES = ("screening", "derivation", "annotation", "distractors", "composition", "assurance")

Step = Callable[[dict], Awaitable[dict]]
"""Returns what it adds to a sample; raises Rejected, ChatError or Stopped."""


def construction_steps(generator: Asker, reviewers: Sequence[Asker],
                       layout: LayoutLimits = LayoutLimits()) -> dict[str, Step]:
    """Returns the six stages by name, in order, each with whom it asks."""
    return dict(zip(STAGES, (
        functools.partial(screen, ask=generator),
        functools.partial(derive, ask=generator),
        functools.partial(annotate, ask=generator),
        functools.partial(distract, ask=generator, limits=layout),
        functools.partial(compose, ask=generator),
        functools.partial(assure, reviewers=reviewers)), strict=True))


class Pipeline:
    """Moves samples through steps and writes down every decision.

    Args:
      folder: where each step's journal is, `<n>_<step>.jsonl`.
      steps: by name, in order.
      may_run: names of those that may run now (None: all); a sample stops before any other that it
        has not passed.
    """

    def __init__(self, folder: pathlib.Path, steps: Mapping[str, Step],
                 may_run: Sequence[str] | None = None):
        self.journals = {name: Journal(folder / f"{number}_{name}.jsonl")
                         for number, name in enumerate(steps, start=1)}
        self.passed_now = 0
        self._steps = dict(steps)
        self._may_run = frozenset(steps if may_run is None else may_run)
        self._last = list(self.journals.values())[-1]

    async def run(self, samples: Iterable[dict], *, at_once: int) -> None:
        """Advances every sample as far as it goes, `at_once` of them at a time, in order.

        Args:
          samples: taken one by one, as there is room.
          at_once: samples on their way at once.

        Raises:
          OSError: a journal cannot be written; what was being asked is waited for.
        """
        waiting = iter(samples)

        async def work():
            for sample in waiting:
                if not await self.advance(sample):
                    return

        workers = [asyncio.create_task(work()) for _ in range(at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def advance(self, sample: dict) -> bool:
        """Moves one sample as far as it goes; False where the run is to end.

        A sample that an endpoint failed is written down as such, and begun again by a later run.
        """
        for name, journal in self.journals.items():
            decision = journal.decisions.get(sample["id"])
            if decision and decision.kind == KEPT:
                sample = sample | journal.added(sample["id"])
                continue
            if name not in self._may_run or (decision and decision.kind == REJECTED):
                return True
            try:
                added = await self._steps[name](sample)
            except Rejected as rejected:
                journal.write(sample["id"], REJECTED, reason=rejected.reason,
                              detail=rejected.detail)
                self.passed_now += 1
                return True
            except ChatError as error:
                if error.kind == "budget":
                    return False
                journal.write(sample["id"], FAILED, reason=error.kind, detail=str(error))
                self.passed_now += 1
                return True
            except Stopped:
                return False
            journal.write(sample["id"], KEPT, added=added)
            sample = sample | added
        self.passed_now += 1
        return True

    def finished(self, sample: dict) -> dict | None:
        """Returns the sample with all that the steps added, or None where it did not pass all."""
        for journal in self.journals.values():
            decision = journal.decisions.get(sample["id"])
            if decision is None or decision.kind != KEPT:
                return None
            sample = sample | journal.added(sample["id"])
        return sample

    def has_passed(self, sample_id: str) -> bool:
        """Says whether a sample has passed all steps."""
        decision = self._last.decisions.get(sample_id)
        return decision is not None and decision.kind == KEPT

    @property
    def num_passed(self) -> int:
        """Number of samples that have passed all steps."""
        return self._last.counts()[KEPT, ""]

    def counts_of(self, kind: str) -> Counter:
        """Counts the decisions of one kind by "step/reason"."""
        return Counter({f"{name}/{reason}": count for name, journal in self.journals.items()
                        for (found, reason), count in journal.counts().items() if found == kind})

    def close(self) -> None:
        """Closes the journals."""
        for journal in self.journals.values():
            journal.close()
