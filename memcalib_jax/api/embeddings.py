"""An asynchronous client for OpenAI-compatible embeddings."""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from memcalib_jax.api.connections import Connections
from memcalib_jax.api.failures import ChatError, backoff_seconds
from memcalib_jax.api.limits import Limits, shared_gate
from memcalib_jax.api.settings import ChatSettings, read_api_key

TEXTS_A_REQUEST = 128

_BYTES_A_TOKEN = 3
_BYTES_A_VECTOR = 2**16


class EmbeddingClient:
    """Asks one endpoint for vectors of texts, within its limits.

    Of the settings, those of a reply's making say nothing here. Limits count together with those of
    chats at the same endpoint. `api_key` None reads the environment variable that the settings
    name.

    Attributes:
      counts: "requests", "retries", "texts" and "failed_texts".

    Raises:
      ValueError: a remote https endpoint without a key, or a key that no HTTP header can hold.
    """

    def __init__(self, settings: ChatSettings, *, api_key: str | None = None):
        self.settings = settings
        self.counts: Counter[str] = Counter()
        environ = os.environ if api_key is None else {settings.key_variable: api_key}
        key = read_api_key(settings, environ)
        self._connections = Connections(settings, key)
        self._gate = shared_gate(settings.base_url, key)
        self._limits = Limits(settings.max_concurrent, settings.requests_per_minute,
                              settings.tokens_per_minute)
        self._rng = random.Random()

    async def aclose(self) -> None:
        """Ends the connections that are not in use."""
        await self._connections.aclose()

    async def embed(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """Returns one float32 vector a text; None for those whose requests were given up."""
        parts = [list(texts[first:first + TEXTS_A_REQUEST])
                 for first in range(0, len(texts), TEXTS_A_REQUEST)]
        done = await asyncio.gather(*map(self._part, parts))
        return [vector for vectors in done for vector in vectors]

    async def _part(self, texts):
        self.counts["texts"] += len(texts)
        for attempt in range(self.settings.max_attempts):
            try:
                return await self._attempt(texts)
            except ChatError as error:
                longest = self.settings.timeout
                if (not error.retried or attempt + 1 == self.settings.max_attempts
                        or (error.retry_after or 0.0) > longest):
                    break
                self.counts["retries"] += 1
                await asyncio.sleep(backoff_seconds(attempt, self._rng)
                                    if error.retry_after is None else error.retry_after)
        self.counts["failed_texts"] += len(texts)
        return [None] * len(texts)

    async def _attempt(self, texts):
        self.counts["requests"] += 1
        content = json.dumps({"model": self.settings.model, "input": texts}).encode("ascii")
        tokens = len(content) // _BYTES_A_TOKEN
        granted, _ = await self._gate.enter(self._limits, tokens=tokens,
                                            size=len(content) + _BYTES_A_VECTOR * len(texts))
        try:
            answer = await self._connections.request("POST", "/embeddings", content,
                                                     self.settings.timeout)
            self._gate.speed_up()
        except ChatError as error:
            if error.status == 429:
                self._gate.slow_down(granted, min(error.retry_after or 0.0, self.settings.timeout))
            raise
        finally:
            self._gate.leave(granted)
        return _vectors(answer, len(texts))


def _vectors(answer, count: int) -> list[np.ndarray]:
    """Reads the vectors of an answer, which may come in any order.

    Raises:
      ChatError: it is no list of `count` vectors of finite numbers.
    """
    try:
        rows = sorted(answer.value["data"], key=lambda row: row["index"])
        vectors = [np.asarray(row["embedding"], np.float32) for row in rows]
        good = ([row["index"] for row in rows] == list(range(count)) and all(
            vector.ndim == 1 and vector.size and np.isfinite(vector).all() for vector in vectors))
    except (ValueError, TypeError, KeyError, RecursionError):
        good = False
    if not good:
        raise ChatError("parse", f"the endpoint's answer holds no embeddings of {count} texts")
    return vectors
