"""Judges responses in the background, each once: what the journal holds is not asked again."""

import concurrent.futures
import hashlib
import pathlib

import jax

from memcalib_jax.api import BackgroundLoop
from memcalib_jax.data import LEVELS, Record
from memcalib_jax.jsonlines import DamagedFile, JsonLines, read_rows
from memcalib_jax.judge import AtomJudgment, Judge, Judgment


class Journal:
    """Judgments on disk, written as they arrive.

    A step that is done again after a crash finds its judgments here, failed ones included, and
    so comes to the same numbers. With `retry_failed` it finds the valid ones only. Each process of
    a program, `writer`, writes a file of its own beside `path` and reads all of them, so that
    another number of processes finds everything too.

    Raises:
      DamagedFile: the file holds something else; names it.
    """

    def __init__(self, path: pathlib.Path, *, retry_failed: bool = False, writer: int = 0):
        own = path.with_stem(f"{path.stem}.process_{writer}") if writer else path
        self._lines = JsonLines(own)
        others = {path, *path.parent.glob(f"{path.stem}.process_*{path.suffix}")} - {own}
        rows = sum(map(read_rows, sorted(others)), self._lines.rows)
        try:
            self._known = {
                (row["id"], row["sample"], row["response_sha256"]): judgment_from_json(row)
                for row in rows if row["valid"] or not retry_failed}
        except (KeyError, TypeError, ValueError):
            raise DamagedFile(f"{path}: a line is no judgment; move the file away to have its "
                              "responses judged again") from None

    @staticmethod
    def key(record: Record, sample_index: int, text: str) -> tuple:
        """Returns what identifies a judgment: the record, the sample and the very response."""
        return record.id, sample_index, hashlib.sha256(text.encode()).hexdigest()

    def get(self, key: tuple) -> Judgment | None:
        """Returns the judgment that the file held under a key when it was opened."""
        return self._known.get(key)

    def put(self, key: tuple, judgment: Judgment):
        """Writes a judgment out before anyone can build on it."""
        self._lines.append(
            dict(zip(("id", "sample", "response_sha256"), key)) | judgment_to_json(judgment))

    def close(self):
        """Closes the file."""
        self._lines.close()


def judgment_to_json(judgment: Judgment) -> dict:
    """Returns a judgment as JSON: an object an atom, or the reason why there are none."""
    atoms = [{"atom_id": atom.atom_id, "level": LEVELS[atom.level],
              "evidence_quote": atom.evidence_quote, "reason": atom.reason}
             for atom in judgment.details]
    return {"valid": judgment.valid, "reason": judgment.reason, "atoms": atoms}


def judgment_from_json(row: dict) -> Judgment:
    """Returns the judgment that `judgment_to_json` wrote."""
    if not row["valid"]:
        return Judgment.invalid(row["reason"])
    details = tuple(
        AtomJudgment(atom["atom_id"], LEVELS.index(atom["level"]), atom["evidence_quote"],
                     atom["reason"]) for atom in row["atoms"])
    return Judgment(tuple(atom.level for atom in details), True, None, details)


class JudgePool:
    """Runs judge calls on a background loop, through a journal.

    `first_sample` is added to the sample index that the judge is told: it tells apart judgments of
    equal responses in different journals, such as those of other seeds, which its cache would
    otherwise make one. With `shared` the processes of a program share the prompts between them, so
    that each judges some; else this one judges all.

    Attributes:
      shared: whether other processes judge some of the prompts.
      submitted: the records and futures of all calls so far, in order.
    """

    def __init__(self, judge: Judge, loop: BackgroundLoop, journal: Journal, *,
                 first_sample: int = 0, shared: bool = False):
        self._judge, self._loop, self._journal = judge, loop, journal
        self._first_sample = first_sample
        self.shared = shared and jax.process_count() > 1
        self.submitted: list[tuple[Record, concurrent.futures.Future]] = []

    def takes(self, prompt: int) -> bool:
        """Returns whether this process judges the responses to the n-th prompt of a batch."""
        return not self.shared or prompt % jax.process_count() == jax.process_index()

    def submit(self, record: Record, sample_index: int, text: str) -> concurrent.futures.Future:
        """Starts judging a response; returns the future of its `Judgment`."""
        key = Journal.key(record, sample_index, text)
        known = self._journal.get(key)
        if known is None:
            future = self._loop.submit(self._ask(key, record, sample_index, text))
        else:
            future = concurrent.futures.Future()
            future.set_result(known)
        self.submitted.append((record, future))
        return future

    def fail(self, record: Record, sample_index: int, text: str, reason: str):
        """Notes a response that there is nothing to judge of, as invalid."""
        judgment = Judgment.invalid(reason)
        self._journal.put(Journal.key(record, sample_index, text), judgment)
        future = concurrent.futures.Future()
        future.set_result(judgment)
        self.submitted.append((record, future))

    async def _ask(self, key, record, sample_index, text) -> Judgment:
        judgment = await self._judge.judge(record, text,
                                           sample_index=self._first_sample + sample_index)
        self._journal.put(key, judgment)
        return judgment
