"""Append-only JSON Lines that survive a crash in the middle of a line."""

import json
import pathlib
import threading


class JsonLines:
    """Rows on disk, one JSON object a line, each written out before `append` returns.

    A last line that a crash cut off is dropped when the file is opened. Safe to call from
    several threads.

    Attributes:
      rows: what the file held when it was opened.
    """

    def __init__(self, path: pathlib.Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes() if path.exists() else b""
        whole = data.rfind(b"\n") + 1
        self.rows: list[dict] = [json.loads(line) for line in data[:whole].split(b"\n") if line]
        self._lock = threading.Lock()
        self._file = path.open("ab")
        self._file.truncate(whole)

    def append(self, row: dict):
        """Writes one row."""
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def close(self):
        """Closes the file."""
        self._file.close()
