"""Requests of many threads answered together: a queue that is emptied batch by batch."""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


class Full(Exception):
    """Says that as many requests wait as may."""


@dataclass(frozen=True)
class Job:
    """One request: `kind` says with which others it can be answered, `future` gets the answer."""

    kind: Hashable
    request: Any
    future: Future = field(default_factory=Future)


class Batches:
    """Answers requests in a thread of its own, up to `largest` of one kind together.

    The request that has waited longest is always in the next batch, with those of its kind in the
    order in which they came: so none waits for ever.

    Args:
      run: answers a batch of one kind; sets every job's future, at once or one by one.
      largest: most requests of a batch.
      most_waiting: most requests that wait, those of the running batch not counted.
    """

    def __init__(self, run: Callable[[Sequence[Job]], None], *, largest: int, most_waiting: int):
        self._run = run
        self._largest, self._most_waiting = largest, most_waiting
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    def submit(self, kind: Hashable, request) -> Future:
        """Queues a request; its future gets the answer.

        Raises:
          Full: too many wait.
        """
        job = Job(kind, request)
        with self._changed:
            if self._closed or len(self._waiting) >= self._most_waiting:
                raise Full
            self._waiting.append(job)
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Gives up what waits, and ends the thread after the running batch."""
        with self._changed:
            self._closed = True
            for job in self._waiting:
                job.future.cancel()
            self._waiting.clear()
            self._changed.notify()
        self._thread.join()

    def _take(self) -> list[Job]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return []
            kind = self._waiting[0].kind
            taken = [job for job in self._waiting if job.kind == kind][: self._largest]
            gone = set(map(id, taken))
            self._waiting = deque(job for job in self._waiting if id(job) not in gone)
            return taken

    def _work(self):
        while jobs := self._take():
            try:
                self._run(jobs)
                missing = RuntimeError("the batch ended without an answer")
            except Exception as error:  # Whatever it is, those who wait must hear of it.
                missing = error
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(missing)
