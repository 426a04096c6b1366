import asyncio
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from memcalib_jax.api import BackgroundLoop


def test_results_and_errors_come_back():
    async def double(value):
        await asyncio.sleep(0)
        return 2 * value, threading.current_thread().name

    async def fail():
        raise KeyError("lost")

    with BackgroundLoop("judging") as loop:
        assert [loop.submit(double(i)).result(5) for i in range(3)] == [
            (0, "judging"),
            (2, "judging"),
            (4, "judging"),
        ]
        with pytest.raises(KeyError, match="lost"):
            loop.submit(fail()).result(5)


def test_close_cancels_and_waits():
    ended = []
    started = threading.Event()

    async def wait():
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    loop = BackgroundLoop()
    future = loop.submit(wait())
    assert started.wait(5)
    loop.close()
    assert ended == [True]
    with pytest.raises(CancelledError):
        future.result(5)
    loop.close()


def test_one_future_can_be_cancelled():
    seen = threading.Event()
    started = threading.Event()

    async def wait():
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            seen.set()

    with BackgroundLoop() as loop:
        future = loop.submit(wait())
        assert started.wait(5)
        future.cancel()
        assert seen.wait(5)


def test_closed_loop_refuses():
    async def nothing():
        pass

    loop = BackgroundLoop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit(nothing())


def test_interpreter_exit_ends_pending_work():
    program = """
import asyncio
from memcalib_jax.api import BackgroundLoop

async def wait():
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)

loop = BackgroundLoop()
loop.submit(wait())
loop.submit(asyncio.sleep(0)).result()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "cleaned up\n", "")
