"""Connections to one endpoint, and requests over them that show their key to nobody else."""

import asyncio
import functools
import json
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx

from memcalib_jax.api.failures import ChatError, http_failure
from memcalib_jax.api.settings import ChatSettings

_QUOTED_CHARACTERS = 1000
_LARGEST_ANSWER = 16 * 2**20


@dataclass(frozen=True)
class Answer:
    """An endpoint's answer of a status in the 200s; `seconds` is how long it took."""

    content: bytes
    seconds: float

    @functools.cached_property
    def value(self):
        """The answer as JSON; a ValueError or RecursionError where it is none."""
        return json.loads(self.content)


class Connections:
    """Up to `settings.max_concurrent` connections, opened as they are needed.

    One connection a client: the cost of httpx's own pool grows with its connections, and 64 single
    ones do several times the requests of a pool of 64. Last in, first out: the warm ones serve.
    """

    def __init__(self, settings: ChatSettings, key: str | None):
        self._settings = settings
        self._key = key
        self._slots: asyncio.LifoQueue[httpx.AsyncClient | None] = asyncio.LifoQueue()
        for _ in range(settings.max_concurrent):
            self._slots.put_nowait(None)
        self._tls = None
        if key:
            _hide_in_logs(key)

    async def aclose(self) -> None:
        """Ends the connections that are not in use."""
        slots = [self._slots.get_nowait() for _ in range(self._slots.qsize())]
        for client in slots:
            self._slots.put_nowait(None)
            if client is not None:
                await client.aclose()

    async def request(self, method: str, path: str, content: bytes | None,
                      timeout: float) -> Answer:
        """Sends one request and reads its answer, all within `timeout` seconds.

        Raises:
          ChatError: there was no answer, or one of another status; names neither key nor headers.
        """
        started = asyncio.get_running_loop().time()
        try:
            # httpx bounds single reads and writes; this bounds the whole.
            async with self._slot() as client, asyncio.timeout(timeout):
                response, answer = await self._exchange(client, method, path, content)
            failure = None
        except TimeoutError:
            failure = ChatError("timeout", f"no answer within {timeout:g} s")
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            problem = f"{type(error).__name__}: {error}".removesuffix(": ")
            failure = ChatError("network", self.quote(problem))
        # Raised here, so that no exception with the request and its headers hangs on it.
        if failure is not None:
            raise failure
        if not response.is_success:
            raise http_failure(response.status_code, self.quote(answer.decode("utf-8", "replace")),
                               response.headers.get("retry-after"), datetime.now(UTC))
        return Answer(answer, asyncio.get_running_loop().time() - started)

    @asynccontextmanager
    async def _slot(self):
        client = await self._slots.get()
        try:
            if client is None:
                client = self._new_client()
            yield client
        except BaseException:
            # A request that was broken off may keep the only connection of its client.
            broken, client = client, None
            if broken is not None:
                await broken.aclose()
            raise
        finally:
            self._slots.put_nowait(client)

    async def _exchange(self, client, method, path, content):
        url = self._settings.base_url + path
        async with client.stream(method, url, content=content) as response:
            parts, size = [], 0
            async for part in response.aiter_bytes():
                size += len(part)
                if size > _LARGEST_ANSWER:
                    raise httpx.ReadError(f"the answer is longer than {_LARGEST_ANSWER} bytes")
                parts.append(part)
        return response, b"".join(parts)

    def _new_client(self):
        if self._tls is None:
            self._tls = httpx.create_ssl_context()
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return httpx.AsyncClient(
            headers=headers,
            timeout=None,
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1),
            verify=self._tls,
            # A proxy from the environment cannot reach this machine's own servers.
            trust_env=not self._settings.is_loopback,
        )

    def hide_key(self, text: str) -> str:
        """Takes the key out of a text; an endpoint may send it back."""
        return _hidden(text, self._key) if self._key else text

    def quote(self, text: str) -> str:
        """Makes a short line of a text, without the key, for messages."""
        text = " ".join(self.hide_key(text).split())
        return text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + " ..."


def _hidden(text: str, key: str) -> str:
    return text.replace(key, "[key]").replace(key.replace("/", "\\/"), "[key]")


class _Redaction(logging.Filter):
    """Takes a key out of what the HTTP libraries log of an endpoint that sends it back."""

    def __init__(self, key: str):
        super().__init__()
        self._key = key

    def filter(self, record):
        message = record.getMessage()
        if self._key in message:
            record.msg, record.args = _hidden(message, self._key), ()
        return True


_redacted: set[str] = set()


def _hide_in_logs(key: str) -> None:
    if key in _redacted:
        return
    _redacted.add(key)
    for name in ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.http2",
                 "httpcore.proxy"):
        logging.getLogger(name).addFilter(_Redaction(key))
