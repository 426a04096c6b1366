"""An asynchronous client for OpenAI-compatible chat completions."""

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx

from memcalib_jax.api.accounting import Accounting
from memcalib_jax.api.cache import ReplyCache, request_key
from memcalib_jax.api.failures import ChatError, backoff_seconds, http_failure
from memcalib_jax.api.limits import RequestWindow
from memcalib_jax.api.settings import API_KEY_VARIABLE, THINKING_OFF, ChatSettings, read_api_key

_PROBE_SECONDS = 10.0
_QUOTED_CHARACTERS = 1000


@dataclass(frozen=True)
class Reply:
    """Holds a model's reply and its cost; `parsed` is what the caller's check made of the text.

    The tokens are the kept attempt's; a cached reply took no attempt and no tokens.
    """

    text: str
    parsed: Any = None
    cached: bool = False
    attempts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatClient:
    """Asks one endpoint, within its limits, and keeps the checked replies.

    `api_key` None reads `MEMCALIB_JUDGE_API_KEY`. An instance belongs to the event loop of its
    first call; `aclose` (or `async with`) ends its connections. `clock`, `sleep` and `rng` are
    for tests.

    Raises:
      ValueError: a remote https endpoint without a key, or a key that no HTTP header can hold.
    """

    def __init__(
        self,
        settings: ChatSettings,
        *,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ):
        self.settings = settings
        environ = os.environ if api_key is None else {API_KEY_VARIABLE: api_key}
        self._key = read_api_key(settings, environ)
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._window = RequestWindow(settings.requests_per_minute, clock=clock, sleep=sleep)
        self._cache = ReplyCache(settings.cache_dir) if settings.cache_dir is not None else None
        self._accounting = Accounting()
        self._thinking_field = settings.thinking_field
        # One connection a client: the cost of httpx's own pool grows with its connections, and 64
        # single ones do several times the requests of a pool of 64. Last in, first out: the warm
        # ones serve.
        self._slots: asyncio.LifoQueue[httpx.AsyncClient | None] = asyncio.LifoQueue()
        for _ in range(settings.max_concurrent):
            self._slots.put_nowait(None)
        self._tls = None

    async def __aenter__(self) -> "ChatClient":
        return self

    async def __aexit__(self, *exception) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the connections that are not in use."""
        slots = [self._slots.get_nowait() for _ in range(self._slots.qsize())]
        for client in slots:
            self._slots.put_nowait(None)
            if client is not None:
                await client.aclose()

    def stats(self) -> dict:
        """Copies the counts since the start: requests, attempts, retries, tokens, failures, waits.

        `failures` counts requests that were given up, `failed_attempts` every attempt, by kind.
        """
        return self._accounting.snapshot()

    async def probe(self) -> tuple[str, ...]:
        """Asks for the endpoint's models within ten seconds; returns the ids that it lists.

        For the start of a program, before anything costly. An endpoint that answers without a
        list passes.

        Raises:
          ChatError: it cannot be reached, refuses the key, or answers with an error of its own.
        """
        try:
            response = await self._send("GET", "/models", None, _PROBE_SECONDS)
        except ChatError as error:
            url = self.settings.base_url
            if error.status in (401, 403):
                raise ChatError(
                    error.kind,
                    f"{url} refuses the key (HTTP {error.status}): "
                    f"check the environment variable {API_KEY_VARIABLE}",
                    status=error.status,
                ) from None
            if error.kind in ("network", "timeout", "http_5xx"):
                advice = "check the address and that the server is running"
                raise ChatError(error.kind, f"cannot use {url}: {error}; {advice}") from None
            return ()
        try:
            models = tuple(str(model["id"]) for model in response.json()["data"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return ()
        if models and self.settings.model not in models:
            logging.getLogger(__name__).warning(
                "%s does not list the model %r; it lists %s",
                self.settings.base_url,
                self.settings.model,
                ", ".join(models[:8]),
            )
        return models

    async def complete(
        self,
        messages: Sequence[dict],
        *,
        sample_index: int = 0,
        check: Callable[[str], Any] | None = None,
    ) -> Reply:
        """Asks for one reply to the messages.

        Args:
          messages: chat messages with `role` and `content`.
          sample_index: tells apart replies to equal messages; part of the cache's key.
          check: parses a reply and raises ValueError for a bad one, which is asked for again and
            never kept. What it returns becomes `Reply.parsed`.

        Raises:
          ChatError: no good reply came. Its message holds neither key nor headers.
        """
        self._accounting.counts["requests"] += 1
        if self._cache is None:
            return await self._ask(messages, check)
        key = request_key(self.settings, messages, sample_index)
        reply = self._cached(key, check)
        if reply is None:
            reply = await self._ask(messages, check)
            self._cache.put(key, reply.text)
        return reply

    def _cached(self, key, check):
        text = self._cache.get(key)
        if text is None:
            return None
        try:
            parsed = check(text) if check else None
        except ValueError:
            return None
        self._accounting.counts["cache_hits"] += 1
        return Reply(text, parsed, cached=True)

    async def _ask(self, messages, check):
        for attempt in range(self.settings.max_attempts):
            try:
                return await self._attempt(messages, check, attempt + 1)
            except ChatError as error:
                failure = error
            self._accounting.failed_attempts[failure.kind] += 1
            if not failure.retried or attempt + 1 == self.settings.max_attempts:
                break
            if (failure.retry_after or 0.0) > self.settings.timeout:
                break  # Coming back sooner than asked is no use, and so long a wait none to us.
            self._accounting.counts["retries"] += 1
            await self._wait(failure, attempt)
        self._accounting.failures[failure.kind] += 1
        raise failure

    async def _wait(self, failure, retry):
        if failure.retry_after is None:
            seconds = backoff_seconds(retry, self._rng)
        else:
            seconds = failure.retry_after + self._rng.uniform(0.0, 0.5)
        self._accounting.waited(seconds)
        await self._sleep(seconds)

    async def _attempt(self, messages, check, attempt):
        self._accounting.counts["attempts"] += 1
        response = await self._post(messages)
        self._accounting.latencies.append(response.elapsed.total_seconds())
        text, finish_reason, usage = _read_completion(response)
        text = self._hide_key(text)
        self._accounting.counts.update(usage)
        if not text.strip():
            raise ChatError("empty", f"the reply is empty{_cut_note(finish_reason)}")
        problem = parsed = None
        if check:
            try:
                parsed = check(text)
            except ValueError as error:
                problem = self._quote(str(error))
        if problem is not None:
            raise ChatError("parse", f"bad reply: {problem}{_cut_note(finish_reason)}")
        return Reply(text, parsed, attempts=attempt, **usage)

    async def _post(self, messages):
        body = {
            "model": self.settings.model,
            "messages": list(messages),
            "temperature": self.settings.temperature,
            "max_tokens": self.settings.max_tokens,
        }
        field = self._thinking_field
        if field is not None:
            body[field] = THINKING_OFF[field]
        try:
            return await self._send("POST", "/chat/completions", body, self.settings.timeout)
        except ChatError as error:
            if field is None or error.status not in (400, 422) or field not in str(error):
                raise
        # The endpoint does not know the field: from now on do without it.
        self._thinking_field = None
        del body[field]
        return await self._send("POST", "/chat/completions", body, self.settings.timeout)

    async def _send(self, method, path, body, timeout):
        # ASCII: a lone surrogate in a model's text has no UTF-8.
        content = None if body is None else json.dumps(body).encode("ascii")
        try:
            async with self._slot() as client:
                self._accounting.waited(await self._window.wait())
                # httpx bounds single reads and writes; this bounds the whole.
                async with asyncio.timeout(timeout):
                    url = self.settings.base_url + path
                    response = await client.request(method, url, content=content)
                failure = None
        except TimeoutError:
            failure = ChatError("timeout", f"no answer within {timeout:g} s")
        except (httpx.HTTPError, OSError) as error:
            problem = f"{type(error).__name__}: {error}".removesuffix(": ")
            failure = ChatError("network", self._quote(problem))
        # Raised here, so that no exception with the request and its headers hangs on it.
        if failure is not None:
            raise failure
        if response.is_success:
            return response
        raise http_failure(
            response.status_code,
            self._quote(response.text),
            response.headers.get("retry-after"),
            datetime.now(UTC),
        )

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
            trust_env=not self.settings.is_loopback,
        )

    def _hide_key(self, text):
        return text.replace(self._key, "[key]") if self._key else text

    def _quote(self, text):
        text = " ".join(self._hide_key(text).split())
        return text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + " ..."


def _read_completion(response):
    try:
        body = response.json()
        choice = body["choices"][0]
        text = choice["message"]["content"]
        finish_reason = choice.get("finish_reason")
        usage = body.get("usage") or {}
        counts = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        counts = None
    if counts is None or not isinstance(text, str | None):
        raise ChatError("parse", "the endpoint's answer is no chat completion")
    counts = {name: value if isinstance(value, int) else 0 for name, value in counts.items()}
    return text or "", finish_reason, counts


def _cut_note(finish_reason):
    return " (it was cut at max_tokens)" if finish_reason == "length" else ""
