"""Append-only JSON Lines that survive a crash in the middle of a line."""

import json
import pathlib
import threading


class DamagedFile(ValueError):
    """A file of the run holds something else than it should; says where and what to do."""


class JsonLines:
    """Rows on disk, one JSON object a line, each written out before `append` returns.

    A last line that a crash cut off is dropped when the file is opened. Safe to call from
    several threads.

    Attributes:
      rows: what the file held when it was opened.

    Raises:
      DamagedFile: a whole line is no JSON object; names file and line.
    """

    def __init__(self, path: pathlib.Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows, whole = _read(path)
        self._lock = threading.Lock()
        self._file = path.open("ab")
        self._file.truncate(whole)

    def append(self, row: dict):
        """Writes one row."""
        # ASCII: a judge may write half of a surrogate pair, which has no UTF-8.
        line = json.dumps(row).encode("ascii") + b"\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def close(self):
        """Closes the file."""
        self._file.close()


def read_rows(path: pathlib.Path) -> list[dict]:
    """Returns the rows of a file that another may be writing; none where there is no file.

    Raises:
      DamagedFile: a whole line is no JSON object; names file and line.
    """
    return _read(path)[0]


def _read(path):
    """Returns the rows of whole lines, and how many bytes these take."""
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    return [_parse(path, number, line)
            for number, line in enumerate(data[:whole].split(b"\n"), start=1) if line], whole


def _parse(path, number, line):
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise DamagedFile(f"{path}, line {number}: no JSON object; mend or remove the line")
    return row
