"""Judges responses in the background, each once: what the journal holds is not asked again."""

import concurrent.futures
import hashlib
import pathlib

from memcalib_jax.api import BackgroundLoop
from memcalib_jax.data import LEVELS, Record
from memcalib_jax.judge import AtomJudgment, Judge, Judgment
from memcalib_jax.training.jsonlines import DamagedFile, JsonLines


class Journal:
    """Judgments on disk, written as they arrive.

    A step that is done again after a crash finds its judgments here, failed ones included, and
    so comes to the same numbers. With `retry_failed` it finds the valid ones only.

    Raises:
      DamagedFile: the file holds something else; names it.
    """

    def __init__(self, path: pathlib.Path, *, retry_failed: bool = False):
        self._lines = JsonLines(path)
        try:
            self._known = {
                (row["id"], row["sample"], row["response_sha256"]): judgment_from_json(row)
                for row in self._lines.rows if row["valid"] or not retry_failed}
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

    Attributes:
      submitted: the records and futures of all calls so far, in order.
    """

    def __init__(self, judge: Judge, loop: BackgroundLoop, journal: Journal):
        self._judge, self._loop, self._journal = judge, loop, journal
        self.submitted: list[tuple[Record, concurrent.futures.Future]] = []

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

    async def _ask(self, key, record, sample_index, text) -> Judgment:
        judgment = await self._judge.judge(record, text, sample_index=sample_index)
        self._journal.put(key, judgment)
        return judgment
