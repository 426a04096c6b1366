"""Replies on disk, found by the content of their request."""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from memcalib_jax.api.settings import ChatSettings


def request_key(settings: ChatSettings, messages: Sequence[dict], sample_index: int) -> str:
    """Hashes what decides a reply: model, messages, sampling parameters and sample index."""
    content = {
        "model": settings.model,
        "messages": list(messages),
        "temperature": float(settings.temperature),
        "max_tokens": settings.max_tokens,
        "thinking": settings.thinking,
        "sample_index": sample_index,
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


class ReplyCache:
    """Keeps one small JSON file a reply, in 256 folders; safe to share between processes."""

    def __init__(self, folder: str | os.PathLike):
        self._folder = Path(folder)

    def get(self, key: str) -> str | None:
        """Reads the reply's text; None where there is none, or no whole one."""
        try:
            entry = json.loads(self._path(key).read_bytes())
            text = entry["text"] if entry["key"] == key else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return text if isinstance(text, str) else None

    def put(self, key: str, text: str) -> None:
        """Writes the reply whole or not at all."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                json.dump({"key": key, "text": text}, file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"
