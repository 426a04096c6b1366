"""Asking twice where the first answer is slow."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def first_good(ask: Callable[[], Awaitable[T]], after: float,
                     on_hedge: Callable[[], None] = lambda: None) -> T:
    """Asks, and asks once more if there is no answer after some seconds; the first good one wins.

    The other is cancelled. Raises the first failure if both fail.
    """
    tasks = [asyncio.ensure_future(ask())]
    try:
        await asyncio.wait(tasks, timeout=after)
        if not tasks[0].done():
            on_hedge()
            tasks.append(asyncio.ensure_future(ask()))
        while True:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            good = [task for task in tasks if task in done and not task.exception()]
            if good or not pending:
                return (good or tasks)[0].result()
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
