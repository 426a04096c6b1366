"""Replies on disk, found by the content of their request, and asked for by one at a time."""

import errno
import fcntl
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from memcalib_jax.api.settings import ChatSettings


def request_key(settings: ChatSettings, messages: Sequence[dict], sample_index: int,
                schema: Mapping | None = None) -> str:
    """Hashes what decides a reply: model, messages, sampling parameters, sample index, schema."""
    content = {
        "model": settings.model,
        "messages": list(messages),
        "temperature": float(settings.temperature),
        "max_tokens": settings.max_tokens,
        "thinking": settings.thinking,
        "sample_index": sample_index,
    } | ({} if settings.top_p is None else {"top_p": float(settings.top_p)})
    if schema is not None:
        content["schema"] = schema
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


class ReplyCache:
    """Keeps one small JSON file a reply, in 256 folders; safe to share between processes.

    `claim` makes one asker of a reply, over all threads and processes: the others wait for it.
    """

    def __init__(self, folder: str | os.PathLike):
        self._folder = Path(folder)

    def get(self, key: str) -> tuple[str, str | None] | None:
        """Reads a reply's text and why it ended; None where there is none, or no whole one."""
        try:
            entry = json.loads(self._path(key).read_bytes())
            text = entry["text"] if entry["key"] == key else None
            finish_reason = entry.get("finish_reason")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return (text, finish_reason) if isinstance(text, str) else None

    def put(self, key: str, text: str, finish_reason: str | None = None) -> None:
        """Writes the reply whole or not at all."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                json.dump({"key": key, "text": text, "finish_reason": finish_reason}, file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def claim(self, key: str) -> bool:
        """Takes the right to ask for a reply; False where somebody has it. `release` must follow.

        The end of a process, however it comes, gives back what it had.
        """
        return _claims_of(self._folder).take(key)

    def release(self, key: str) -> None:
        """Gives the right back."""
        _claims_of(self._folder).give_back(key)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"


class _Claims:
    """Locks of single bytes of one file: as many as there are keys, and none left by the dead.

    Such a lock is a process's, and closing any handle of the file loses it: so a process opens the
    file once, and remembers which of its own threads has which key.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / ".claims", os.O_RDWR | os.O_CREAT, 0o666)
        self._held: set[str] = set()
        self._lock = threading.Lock()

    def take(self, key: str) -> bool:
        with self._lock:
            if key in self._held:
                return False
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place(key))
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    return False
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                    raise
                # The file system has no locks: then only this process's askers wait.
            self._held.add(key)
            return True

    def give_back(self, key: str) -> None:
        with self._lock:
            self._held.discard(key)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._place(key))
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                    raise

    @staticmethod
    def _place(key: str) -> int:
        return int(key[:15], 16)


_claims: dict[Path, _Claims] = {}
_claims_lock = threading.Lock()


def _claims_of(folder: Path) -> _Claims:
    with _claims_lock:
        folder = folder.resolve()
        if folder not in _claims:
            _claims[folder] = _Claims(folder)
        return _claims[folder]
