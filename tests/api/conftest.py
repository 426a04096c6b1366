"""A real HTTP endpoint on this machine that answers by a script."""

import json
import random
import socket
import struct
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


def completion(text="good", finish_reason="stop", usage=None):
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return {"choices": [choice], **({"usage": usage} if usage else {})}


class ScriptedEndpoint(ThreadingHTTPServer):
    """Answers the n-th request with the n-th step of `script`, then "good" for ever.

    A step is (status, body) or (status, body, headers), or a function of the handler.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = []
        self.requests = []
        self.released = threading.Event()
        self.lock = threading.Lock()
        self.in_flight = self.most_in_flight = 0

    @property
    def base_url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address):
        pass  # Clients of these tests hang up.


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def handle_any(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with server.lock:
            place = len(server.requests)
            server.requests.append(
                (self.command, self.path, dict(self.headers), json.loads(body or "null"))
            )
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        step = server.script[place] if place < len(server.script) else (200, completion())
        step = step(self) if callable(step) else step
        with server.lock:
            server.in_flight -= 1
        if step is not None:
            self.answer(*step)

    do_GET = do_POST = handle_any

    def answer(self, status, body, headers=()):
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


def hang(handler):
    """Answers nothing until the test releases it."""
    handler.server.released.wait(20)
    handler.close_connection = True


def drip(handler):
    """Sends a byte every 20 ms, so that no single read ever waits for long."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    try:
        while not handler.server.released.wait(0.02):
            handler.wfile.write(b" ")
            handler.wfile.flush()
    except OSError:
        pass
    handler.close_connection = True


def reset(handler):
    """Breaks the connection off with a TCP reset."""
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.close_connection = True
    handler.connection.close()


@contextmanager
def _serving():
    server = ScriptedEndpoint()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def endpoint():
    with _serving() as server:
        yield server


@pytest.fixture
def steps():
    """The faults that a script can hold, and how to write a completion."""

    class Steps:
        pass

    for function in (hang, drip, reset, completion):
        setattr(Steps, function.__name__, staticmethod(function))
    return Steps


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def clock(self):
        return self.now

    async def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class QuarterRandom(random.Random):
    """Draws the middle of the jitter, 0.25 s."""

    def uniform(self, low, high):
        return (low + high) / 2


@pytest.fixture
def fake_time():
    return FakeTime()


@pytest.fixture
def open_client(endpoint, fake_time):
    """Makes clients of the endpoint that never really wait."""
    from memcalib_jax.api import ChatClient, ChatSettings

    def make(api_key="", **settings):
        return ChatClient(
            ChatSettings(**{"base_url": endpoint.base_url, "model": "m", **settings}),
            api_key=api_key,
            clock=fake_time.clock,
            sleep=fake_time.sleep,
            rng=QuarterRandom(),
        )

    return make
