"""A journal of calls: an intent before each, its outcome after it; complete after any end."""

import errno
import json
import os
import pathlib
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Past:
    """What a journal tells of the calls so far.

    Attributes:
      open_keys: requests whose last call has no outcome: it was out when its process ended.
      kept: requests with a good reply, which the cache holds.
      prompt_tokens, completion_tokens: of all answered calls, by model.
    """

    open_keys: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    prompt_tokens: Counter = field(default_factory=Counter)
    completion_tokens: Counter = field(default_factory=Counter)


class CallJournal:
    """Appends one line an event; several processes may share the file.

    A line is one write to the end of the file, so that the death of a process leaves it whole. Each
    begins with a line feed: what a full disk or a power cut left of a line spoils no other.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = pathlib.Path(path)
        self._file: int | None = None

    def intent(self, key: str, model: str) -> None:
        """Notes that a call is about to be made for a request."""
        self._write({"event": "intent", "key": key, "model": model, "time": round(time.time(), 3)})

    def reply(self, key: str, model: str, *, kept: bool, prompt_tokens: int,
              completion_tokens: int) -> None:
        """Notes that a call was answered; `kept`: well, and the cache holds the reply."""
        self._write({"event": "reply", "key": key, "model": model, "kept": kept,
                     "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})

    def failure(self, key: str, kind: str) -> None:
        """Notes that a call failed, or was given up."""
        self._write({"event": "failure", "key": key, "kind": kind})

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, event):
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        line = b"\n" + json.dumps(event).encode("ascii") + b"\n"
        if os.write(self._file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))


def read_journal(path: str | os.PathLike) -> Past:
    """Reads what a journal tells; a file that is not there tells nothing."""
    past = Past()
    if not os.path.exists(path):
        return past
    with open(path, "rb") as file:
        for line in file:
            try:
                event = json.loads(line)
                _add(past, event["event"], event)
            except (ValueError, TypeError, KeyError):
                continue  # Blank, or the rest of a line that a crash cut off.
    return past


def _add(past, kind, event):
    if kind == "intent":
        past.open_keys.add(event["key"])
        return
    past.open_keys.discard(event["key"])
    if kind == "reply":
        past.prompt_tokens[event["model"]] += event["prompt_tokens"]
        past.completion_tokens[event["model"]] += event["completion_tokens"]
        if event["kept"]:
            past.kept.add(event["key"])
