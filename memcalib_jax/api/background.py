"""Calls to endpoints from programs that are not asynchronous."""

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class BackgroundLoop:
    """Runs coroutines on an event loop in a thread of its own, while the caller does other work.

    A context manager; `close` also runs at the interpreter's exit.
    """

    def __init__(self, name: str = "api"):
        self._loop = asyncio.new_event_loop()
        # A daemon, since the interpreter joins other threads before it calls exit handlers.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closing = threading.Lock()
        self._closed = False
        self._thread.start()
        atexit.register(self.close)

    def submit(self, coroutine: Coroutine) -> Future[Any]:
        """Starts the coroutine; its future can be waited for, or cancelled, from any thread.

        Raises:
          RuntimeError: the loop is closed.
        """
        with self._closing:
            if self._closed:
                coroutine.close()
                raise RuntimeError("the background loop is closed")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancels what still runs, waits until it has ended, and ends the thread."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> "BackgroundLoop":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            # A task's failure reaches whoever holds its future; here only its end matters.
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
