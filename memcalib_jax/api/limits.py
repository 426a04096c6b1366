"""What all clients of an endpoint share in one process: a gate that every request passes."""

import asyncio
import hashlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from memcalib_jax.api.failures import Stopped

_WINDOW_SECONDS = 60.0


@dataclass(frozen=True)
class Limits:
    """What one client keeps to, counting the requests of all that share its gate.

    Attributes:
      concurrent: most requests that are out at once.
      requests_per_minute: most requests in any 60 seconds.
      tokens_per_minute: most tokens in any 60 seconds, of prompts and replies; None: no limit. What
        a reply may take at most counts until it is known.
      bytes_in_flight: most bytes of the requests that are out, with room for their replies.

    A request that alone exceeds the last two passes when no other counts.
    """

    concurrent: int
    requests_per_minute: int
    tokens_per_minute: int | None = None
    bytes_in_flight: int = 256 * 2**20


@dataclass
class Pass:
    """A request that is out, or went out within the last minute."""

    time: float
    tokens: int
    size: int
    counts: bool = True  # among the last minute's


@dataclass(eq=False)
class _Waiter:
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self):
        try:
            self.loop.call_soon_threadsafe(self.woken.set)
        except RuntimeError:
            pass  # Its loop is closed, and cancelled it.


class Gate:
    """Lets requests pass in the order in which they came, from any thread and event loop.

    When the server says that it is too much (`slow_down`), a quarter fewer requests are out at
    once; four answered ones (`speed_up`) make room for one more.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()
        self._minute: deque[Pass] = deque()
        self._tokens = 0  # of the last minute
        self._out = 0
        self._bytes = 0
        self._ceiling = float("inf")
        self._slowed = self._closed_until = float("-inf")

    async def enter(self, limits: Limits, *, tokens: int = 0, size: int = 0,
                    is_stopped: Callable[[], bool] = lambda: False) -> tuple[Pass, float]:
        """Waits for a pass; returns it and the seconds that took. `leave` must follow.

        Raises:
          Stopped: `is_stopped` said so, at the beginning or after a `wake_all`.
        """
        started = self._clock()
        waiter = _Waiter()
        with self._lock:
            self._waiting.append(waiter)
        try:
            while True:
                with self._lock:
                    waiter.woken.clear()
                    if is_stopped():
                        raise Stopped
                    wait = self._wait_of(waiter, limits, tokens, size)
                    if wait == 0.0:
                        granted = self._grant(tokens, size)
                        return granted, granted.time - started
                await self._wait(waiter, wait)
        finally:
            with self._lock:
                self._waiting.remove(waiter)
                self._wake_first()

    def leave(self, granted: Pass, *, tokens: int | None = None) -> None:
        """Takes a pass back; `tokens` is what the request took, if that is known."""
        with self._lock:
            self._out -= 1
            self._bytes -= granted.size
            if tokens is not None:
                if granted.counts:
                    self._tokens += tokens - granted.tokens
                granted.tokens = tokens
            self._wake_first()

    def wake_all(self) -> None:
        """Makes all that wait look whether they are stopped."""
        with self._lock:
            for waiter in self._waiting:
                waiter.wake()

    def slow_down(self, granted: Pass, seconds: float) -> None:
        """Takes a quarter off what may be out at once, and lets nothing pass for some seconds.

        Of the requests that were out together, one slows down; the others say the same thing.
        """
        with self._lock:
            now = self._clock()
            if granted.time > self._slowed:
                self._ceiling = max(1.0, 0.75 * min(self._ceiling, self._out))
                self._slowed = now
            self._closed_until = max(self._closed_until, now + seconds)

    def speed_up(self) -> None:
        """Notes that the server answered."""
        with self._lock:
            self._ceiling += 0.25

    def _wait_of(self, waiter, limits, tokens, size):
        """Returns how long the waiter must wait: 0 not at all, None until it is woken."""
        if self._waiting[0] is not waiter:
            return None
        if self._out and (self._out + 1 > min(limits.concurrent, self._ceiling)
                          or self._bytes + size > limits.bytes_in_flight):
            return None
        now = self._clock()
        while self._minute and now - self._minute[0].time >= _WINDOW_SECONDS:
            oldest = self._minute.popleft()
            oldest.counts = False
            self._tokens -= oldest.tokens
        waits = [self._closed_until - now]
        if len(self._minute) >= limits.requests_per_minute:
            waits.append(self._leaves(-limits.requests_per_minute, now))
        if limits.tokens_per_minute is not None and self._minute:
            waits.append(self._tokens_wait(limits.tokens_per_minute - tokens, now))
        return max(0.0, *waits)

    def _tokens_wait(self, allowed, now):
        """Returns when enough tokens will have left the minute, or all requests have."""
        left, place = self._tokens, 0
        while left > allowed and place < len(self._minute):
            left -= self._minute[place].tokens
            place += 1
        return self._leaves(place - 1, now) if place else 0.0

    def _leaves(self, place, now):
        return self._minute[place].time + _WINDOW_SECONDS - now

    def _grant(self, tokens, size):
        granted = Pass(self._clock(), tokens, size)
        self._minute.append(granted)
        self._tokens += tokens
        self._out += 1
        self._bytes += size
        return granted

    async def _wait(self, waiter, seconds):
        if seconds is None:
            await waiter.woken.wait()
            return
        # Tokens may be given back before.
        tasks = {asyncio.ensure_future(self._sleep(seconds)),
                 asyncio.ensure_future(waiter.woken.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _wake_first(self):
        if self._waiting:
            self._waiting[0].wake()


_gates: weakref.WeakValueDictionary[tuple[str, bytes], Gate] = weakref.WeakValueDictionary()
_gates_lock = threading.Lock()


def shared_gate(base_url: str, key: str | None) -> Gate:
    """Returns the gate of an endpoint and key, the same for every client in this process."""
    name = base_url, hashlib.sha256((key or "").encode()).digest()
    with _gates_lock:
        gate = _gates.get(name)
        if gate is None:
            gate = _gates[name] = Gate()
        return gate
