"""What a stage decided of every sample, on disk: a run goes on from here after any end."""

import errno
import json
import os
import pathlib
import threading
from collections import Counter
from dataclasses import dataclass

from memcalib_jax.jsonlines import DamagedFile

KEPT, REJECTED, FAILED = "kept", "rejected", "failed"


@dataclass(frozen=True)
class Decision:
    """A stage's decision, without what it added: `reason` is "" of a sample that was kept."""

    kind: str
    reason: str
    offset: int


class Journal:
    """One stage's decisions, one JSON object a line, each written out before `write` returns.

    A later line of a sample replaces an earlier one. A last line that a crash cut off is dropped.
    What samples carry stays on disk; in memory there is an entry a sample.

    Attributes:
      decisions: the newest decision by sample id.

    Raises:
      DamagedFile: a whole line is no decision; names file and line.
      OSError: the file cannot be written.
    """

    def __init__(self, path: pathlib.Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        # Unbuffered: what a full disk refuses must not be written later, behind other lines.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._lock = threading.Lock()
        self.decisions: dict[str, Decision] = {}
        self._end = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    self._note(self._parsed(line, number), self._end)
                    self._end += len(line)
        os.truncate(path, self._end)

    def write(self, sample_id: str, kind: str, *, reason: str = "", detail: str = "",
              added: dict | None = None) -> None:
        """Writes one decision; a kept sample comes with what the stage added to it.

        Raises:
          OSError: it cannot be written; the file is as before.
        """
        row = {"id": sample_id, "decision": kind}
        row |= {"added": added} if kind == KEPT else {"reason": reason, "detail": detail}
        line = json.dumps(row).encode("ascii") + b"\n"
        with self._lock:
            written = os.write(self._file, line)
            if written < len(line):
                os.ftruncate(self._file, self._end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            self._note(row, self._end)
            self._end += len(line)

    def added(self, sample_id: str) -> dict:
        """Reads what the stage added to a sample that it kept."""
        return self._row(sample_id)["added"]

    def detail(self, sample_id: str) -> str:
        """Reads why a sample was not kept."""
        return self._row(sample_id)["detail"]

    def _row(self, sample_id):
        with self._path.open("rb") as file:
            file.seek(self.decisions[sample_id].offset)
            return json.loads(file.readline())

    def counts(self) -> Counter:
        """Counts the decisions by kind and reason."""
        return Counter((decision.kind, decision.reason) for decision in self.decisions.values())

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _note(self, row, offset):
        reason = "" if row["decision"] == KEPT else row["reason"]
        self.decisions[row["id"]] = Decision(row["decision"], reason, offset)

    def _parsed(self, line, number):
        try:
            row = json.loads(line)
            name, kind = {KEPT: ("added", dict), REJECTED: ("reason", str),
                          FAILED: ("reason", str)}[row["decision"]]
            if isinstance(row["id"], str) and isinstance(row[name], kind):
                return row
        except (ValueError, TypeError, KeyError):
            pass
        raise DamagedFile(f"{self._path}, line {number}: no decision of a stage; mend or remove "
                          "the line")
