"""An asynchronous client for OpenAI-compatible chat completions."""

import asyncio
import json
import logging
import os
import pathlib
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memcalib_jax.api.accounting import Accounting
from memcalib_jax.api.budget import Budget
from memcalib_jax.api.cache import ReplyCache, request_key
from memcalib_jax.api.completions import cut_note, read_completion, read_usage
from memcalib_jax.api.connections import Answer, Connections
from memcalib_jax.api.failures import ChatError, Stopped, backoff_seconds
from memcalib_jax.api.hedging import first_good
from memcalib_jax.api.journal import CallJournal
from memcalib_jax.api.limits import Gate, Limits, shared_gate
from memcalib_jax.api.settings import THINKING_OFF, ChatSettings, read_api_key

JOURNAL_NAME = "journal.jsonl"

_PROBE_SECONDS = 10.0
# A reply is looked for anew while somebody else asks for it.
_CLAIM_SECONDS = (0.02, 0.5)
# Of JSON, a token takes more than these bytes but in rare scripts.
_BYTES_A_TOKEN = 3
_REPLY_BYTES_A_TOKEN = 8


@dataclass(frozen=True)
class Reply:
    """Holds a model's reply and its cost; `parsed` is what the caller's check made of the text.

    The tokens are the kept attempt's; a cached reply took no attempt and no tokens.
    """

    text: str
    parsed: Any = None
    cached: bool = False
    attempts: int = 0
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatClient:
    """Asks one endpoint, within its limits, and keeps the checked replies.

    Limits count the requests of every client of this endpoint and key in the process. With a cache,
    equal requests are asked once, over all processes that share it, and its folder has a journal
    of all calls. `api_key` None reads the environment variable that the settings name. An instance
    belongs to the event loop of its first call; `aclose` (or `async with`) ends its connections.
    `clock`, `sleep` and `rng` are for tests; with a clock of its own, a client shares no limit.

    Raises:
      ValueError: a remote https endpoint without a key, or a key that no HTTP header can hold.
    """

    def __init__(
        self,
        settings: ChatSettings,
        *,
        api_key: str | None = None,
        budget: Budget | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ):
        self.settings = settings
        environ = os.environ if api_key is None else {settings.key_variable: api_key}
        key = read_api_key(settings, environ)
        self._connections = Connections(settings, key)
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._gate = (shared_gate(settings.base_url, key) if clock is time.monotonic
                      else Gate(clock=clock, sleep=sleep))
        self._limits = Limits(settings.max_concurrent, settings.requests_per_minute,
                              settings.tokens_per_minute)
        self._budget = budget or Budget()
        self._cache = self._journal = None
        if settings.cache_dir is not None:
            self._cache = ReplyCache(settings.cache_dir)
            self._journal = CallJournal(pathlib.Path(settings.cache_dir) / JOURNAL_NAME)
        self._accounting = Accounting()
        self._thinking_field = settings.thinking_field
        self._limit_field = "max_tokens"
        self._top_p = settings.top_p
        self._structures = ["json_schema", "json_object"]
        self._stopped = asyncio.Event()

    async def __aenter__(self) -> "ChatClient":
        return self

    async def __aexit__(self, *exception) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the connections that are not in use."""
        await self._connections.aclose()

    def stop(self) -> None:
        """Starts no request any more: what is out comes back, all other calls raise `Stopped`.

        For the event loop of the calls.
        """
        self._stopped.set()
        self._gate.wake_all()

    def stats(self) -> dict:
        """Copies the counts since the start: requests, attempts, retries, tokens, failures, waits.

        `failures` counts requests that were given up, `failed_attempts` every attempt, by kind.
        """
        return self._accounting.snapshot()

    @property
    def thinking_field(self) -> str | None:
        """Names the request field that turns thinking off; None: the endpoint refused it, or none
        is sent."""
        return self._thinking_field

    async def probe(self) -> tuple[str, ...]:
        """Asks for the endpoint's models within ten seconds; returns the ids that it lists.

        For the start of a program, before anything costly. An endpoint that answers without a
        list passes.

        Raises:
          ChatError: it cannot be reached, refuses the key, or answers with an error of its own.
        """
        try:
            answer = await self._send("GET", "/models", None, _PROBE_SECONDS)
        except ChatError as error:
            url = self.settings.base_url
            if error.status in (401, 403):
                raise ChatError(
                    error.kind,
                    f"{url} refuses the key (HTTP {error.status}): "
                    f"check the environment variable {self.settings.key_variable}",
                    status=error.status,
                ) from None
            if error.kind in ("network", "timeout", "http_5xx"):
                advice = "check the address and that the server is running"
                raise ChatError(error.kind, f"cannot use {url}: {error}; {advice}") from None
            return ()
        try:
            models = tuple(str(model["id"]) for model in answer.value["data"])
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
        allow_empty: bool = False,
        schema: Mapping | None = None,
    ) -> Reply:
        """Asks for one reply to the messages.

        Args:
          messages: chat messages with `role` and `content`.
          sample_index: tells apart replies to equal messages; part of the cache's key.
          check: parses a reply and raises ValueError for a bad one, which is asked for again and
            never kept. What it returns becomes `Reply.parsed`.
          allow_empty: an empty reply is one too; else it is asked for again.
          schema: JSON schema that the reply should follow, for endpoints that know of it: others
            are asked for any JSON object, or for nothing. Part of the cache's key.

        Raises:
          ChatError: no good reply came. Its message holds neither key nor headers.
          Stopped: the client was stopped before the request went out.
        """
        self._check_stopped()
        self._accounting.counts["requests"] += 1
        request = _Request(messages, check, allow_empty, schema)
        if self._cache is None:
            return await self._ask(request)
        request.key = request_key(self.settings, messages, sample_index, schema)
        wait, longest = _CLAIM_SECONDS
        while True:
            reply = self._cached(request)
            if reply is not None:
                return reply
            if self._cache.claim(request.key):
                break
            await asyncio.sleep(wait)
            self._check_stopped()
            wait = min(2 * wait, longest)
        try:
            # Whoever had the claim may have got the reply since.
            return self._cached(request) or await self._ask(request)
        finally:
            self._cache.release(request.key)

    def _cached(self, request):
        kept = self._cache.get(request.key)
        if kept is None:
            return None
        text, finish_reason = kept
        try:
            parsed = request.check(text) if request.check else None
        except ValueError:
            return None
        self._accounting.counts["cache_hits"] += 1
        return Reply(text, parsed, cached=True, finish_reason=finish_reason)

    async def _ask(self, request):
        for attempt in range(self.settings.max_attempts):
            try:
                return await self._attempt(request, attempt + 1)
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
        tasks = [asyncio.ensure_future(self._sleep(seconds)),
                 asyncio.ensure_future(self._stopped.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        self._check_stopped()

    def _check_stopped(self):
        if self._stopped.is_set():
            raise Stopped

    async def _attempt(self, request, attempt):
        self._accounting.counts["attempts"] += 1
        while True:
            body = self._body(request)
            try:
                answer, usage, charged = await self._hedged(body, request.key)
                break
            except ChatError as error:
                if error.status not in (400, 422) or not self._adapt(body, str(error)):
                    raise
        self._accounting.latencies.append(answer.seconds)
        kept = False
        try:
            reply = self._checked(answer, request, attempt, usage)
            if self._cache is not None:
                self._cache.put(request.key, reply.text, reply.finish_reason)
            kept = True
        finally:
            self._note("reply", request.key, self.settings.model, kept=kept, **charged)
        return reply

    def _checked(self, answer, request, attempt, usage):
        text, finish_reason = read_completion(answer)
        text = self._connections.hide_key(text)
        if not (request.allow_empty or text.strip()):
            raise ChatError("empty", f"the reply is empty{cut_note(finish_reason)}")
        problem = parsed = None
        if request.check:
            try:
                parsed = request.check(text)
            except ValueError as error:
                problem = self._connections.quote(str(error))
        if problem is not None:
            raise ChatError("parse", f"bad reply: {problem}{cut_note(finish_reason)}")
        return Reply(text, parsed, attempts=attempt, finish_reason=finish_reason, **usage)

    async def _hedged(self, body, key):
        if self.settings.hedge_after is None:
            return await self._paid(body, key)

        def count():
            self._accounting.counts["hedges"] += 1

        return await first_good(lambda: self._paid(body, key), self.settings.hedge_after, count)

    async def _paid(self, body, key):
        """Makes one call within the budget.

        Returns the answer, the tokens that it says, and those that count: where it says none, an
        estimate.
        """
        content = _encoded(body)
        prompt_tokens = -(-len(content) // _BYTES_A_TOKEN)
        most = self.settings.max_tokens
        while True:
            reservation = self._budget.reserve(self.settings.model, prompt_tokens, most)
            if reservation is not None:
                break
            await asyncio.sleep(_CLAIM_SECONDS[0])
            self._check_stopped()
        charged = {"prompt_tokens": 0, "completion_tokens": 0}
        kind = "cancelled"
        try:
            self._note("intent", key, self.settings.model)
            answer = await self._send("POST", "/chat/completions", content, self.settings.timeout,
                                      tokens=prompt_tokens + most)
            kind, usage = "", read_usage(answer)
            charged = usage if any(usage.values()) else {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(answer.content) // _BYTES_A_TOKEN}
        except ChatError as error:
            kind = error.kind
            raise
        finally:
            self._budget.settle(reservation, **charged)
            if kind:
                self._note("failure", key, kind)
        self._accounting.counts.update(usage)
        return answer, usage, charged

    def _note(self, event, key, *arguments, **values):
        if self._journal is not None:
            getattr(self._journal, event)(key, *arguments, **values)

    def _body(self, request):
        body = {
            "model": self.settings.model,
            "messages": list(request.messages),
            "temperature": self.settings.temperature,
            self._limit_field: self.settings.max_tokens,
        }
        if self._top_p is not None:
            body["top_p"] = self._top_p
        if self._thinking_field is not None:
            body[self._thinking_field] = THINKING_OFF[self._thinking_field]
        if request.schema is not None and self._structures:
            body["response_format"] = {"type": self._structures[0]}
            if self._structures[0] == "json_schema":
                body["response_format"]["json_schema"] = {
                    "name": "reply", "strict": True, "schema": request.schema}
        return body

    def _adapt(self, body, refusal):
        """Does from now on without what a refusal names; says whether that changes the request.

        What goes changes no reply: a field that the endpoint does not know, the newer name of the
        limit, a nucleus of 1, which is what leaving it out means to an endpoint that minds, and a
        form of the reply, which is checked here anyhow.
        """
        for field in THINKING_OFF:
            if field in body and field in refusal:
                self._thinking_field = None
                return True
        if "max_tokens" in body and "max_completion_tokens" in refusal:
            self._limit_field = "max_completion_tokens"
            return True
        if body.get("top_p") == 1.0 and "top_p" in refusal:
            self._top_p = None
            return True
        if "response_format" in body and ("response_format" in refusal or "json_" in refusal):
            form = body["response_format"]["type"]
            self._structures = self._structures[self._structures.index(form) + 1:] if (
                form in self._structures) else self._structures
            return True
        return False

    async def _send(self, method, path, content, timeout, *, tokens=0) -> Answer:
        size = len(content or b"") + _REPLY_BYTES_A_TOKEN * max(0, tokens)
        granted, waited = await self._gate.enter(self._limits, tokens=tokens, size=size,
                                                 is_stopped=self._stopped.is_set)
        self._accounting.waited(waited)
        taken = None
        try:
            answer = await self._connections.request(method, path, content, timeout)
            self._gate.speed_up()
            if tokens:
                taken = sum(read_usage(answer).values()) or None
            return answer
        except ChatError as error:
            if error.status == 429 or (error.status == 503 and error.retry_after is not None):
                self._gate.slow_down(granted, min(error.retry_after or 0.0, timeout))
            raise
        finally:
            self._gate.leave(granted, tokens=taken)


@dataclass
class _Request:
    messages: Sequence[dict]
    check: Callable[[str], Any] | None
    allow_empty: bool
    schema: Mapping | None
    key: str = ""


def _encoded(body: dict) -> bytes:
    # ASCII: a lone surrogate in a model's text has no UTF-8.
    return json.dumps(body).encode("ascii")
