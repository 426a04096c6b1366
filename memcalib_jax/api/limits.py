"""A limit on requests in any one minute."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

_WINDOW_SECONDS = 60.0


class RequestWindow:
    """Lets at most `limit` callers pass in any 60 seconds, in the order in which they came."""

    def __init__(
        self,
        limit: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._passed: deque[float] = deque(maxlen=limit)
        self._clock = clock
        self._sleep = sleep
        self._turn = asyncio.Lock()

    async def wait(self) -> float:
        """Waits until one more may pass; returns the seconds that took."""
        started = self._clock()
        async with self._turn:
            # Full: the oldest of the last `limit` must leave the window first.
            while len(self._passed) == self._passed.maxlen:
                remaining = self._passed[0] + _WINDOW_SECONDS - self._clock()
                if remaining <= 0.0:
                    break
                await self._sleep(remaining)
            now = self._clock()
            self._passed.append(now)
        return now - started
