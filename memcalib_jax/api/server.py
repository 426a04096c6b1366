"""A small OpenAI-compatible chat server on this machine, around any function that answers."""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_LARGEST_BODY = 16 * 2**20


class Refusal(Exception):
    """Answers a request with an error: its HTTP status, a message and perhaps a Retry-After."""

    def __init__(self, status: int, message: str, *, retry_after: float | None = None):
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class ChatServer(ThreadingHTTPServer):
    """Listens on 127.0.0.1; a thread a connection.

    Args:
      port: 0 takes a free one.
      models: what the server says of itself (`owned_by`), by the id of each model.
      answer: makes the reply's text, or a choice with `message` and `finish_reason` and a `usage`,
        of a request's body; called from several threads. A ValueError becomes an HTTP 400, a
        `Refusal` what it says.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, models: Mapping[str, str], answer: Callable[[dict], str | dict]):
        self.models = dict(models)
        self.answer = answer
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request, client_address):
        """Keeps quiet about clients that hang up; anything else is reported as usual."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def base_url(self) -> str:
        """The address for a client's `base_url`."""
        return f"http://127.0.0.1:{self.server_port}/v1"


@contextmanager
def serving(server: ChatServer) -> Iterator[ChatServer]:
    """Serves from a thread of this process until the context ends."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def last_user_message(messages: object) -> str:
    """Returns the text of the last user message.

    Raises:
      ValueError: the messages are none, or hold no such text.
    """
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        raise ValueError("messages must be a list of objects")
    asked = [item.get("content") for item in messages if item.get("role") == "user"]
    if not asked or not isinstance(asked[-1], str):
        raise ValueError("the last user message must be a string")
    return asked[-1]


def last_user_object(messages: object) -> dict:
    """Returns the JSON object that the last user message is.

    Raises:
      ValueError: it is none.
    """
    asked = last_user_message(messages)
    try:
        payload = json.loads(asked)
    except (ValueError, RecursionError):
        payload = None
    if not isinstance(payload, dict):
        raise ValueError("the last user message must be one JSON object")
    return payload


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # One write an answer, sent at once: else each waits for the client's delayed acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self):
        if self.path != "/v1/models":
            return self._refuse(Refusal(404, f"no such path: {self.path}"))
        models = [{"id": name, "object": "model", "owned_by": owner}
                  for name, owner in self.server.models.items()]
        self._answer(200, {"object": "list", "data": models})

    def do_POST(self):
        try:
            body = self._read_body()
            if self.path != "/v1/chat/completions":
                raise Refusal(404, f"no such path: {self.path}")
            self._answer(200, _completion(self.server, body))
        except Refusal as refusal:
            self._refuse(refusal)

    def _read_body(self):
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length[:12]) > _LARGEST_BODY:
            self.close_connection = True  # What follows is a body that nobody reads.
            raise Refusal(400, f"Content-Length must be a number up to {_LARGEST_BODY}")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise Refusal(400, "the body must be one JSON object")
        return body

    def _refuse(self, refusal):
        kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
        self._answer(refusal.status, {"error": {"message": str(refusal), "type": kind}},
                     refusal.retry_after)

    def _answer(self, status, value, retry_after=None):
        # ASCII, so that any text, lone surrogates too, can be sent.
        content = json.dumps(value).encode("ascii")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if retry_after is not None:
            self.send_header("Retry-After", f"{retry_after:g}")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        """Keeps quiet about single requests."""


def _completion(server, body):
    model = body.get("model")
    if model not in server.models:
        known = ", ".join(f"{name!r} ({owner})" for name, owner in server.models.items())
        raise Refusal(404, f"no model {model!r} here, only {known}")
    if body.get("stream"):
        raise Refusal(400, "stream is not supported")
    try:
        answer = server.answer(body)
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    if isinstance(answer, str):
        answer = {"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
    usage = answer.pop("usage", None)
    return {
        "object": "chat.completion",
        "model": model,
        "choices": [{"index": 0, **answer}],
    } | ({"usage": usage} if usage else {})


def serve_until_signal(make: Callable[[int], ChatServer], options: argparse.Namespace,
                       notice: str) -> None:
    """Serves until SIGTERM or SIGINT; `options` has `port` and `port_file`.

    `port_file` gets the port once the server listens, and is removed at the end.
    """
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    try:
        with serving(make(options.port)) as server:
            if options.port_file:
                _write_port(options.port_file, server.server_port)
            names = ", ".join(server.models)
            print(f"{names} listens on {server.base_url}: {notice}", flush=True)
            stop.wait()
    except (OSError, OverflowError) as error:
        sys.exit(f"cannot serve on port {options.port}: {error}")
    finally:
        if options.port_file and os.path.exists(options.port_file):
            os.unlink(options.port_file)


def add_port_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `serve_until_signal` reads."""
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--port_file", help="file that gets the port once the server listens")


def _write_port(path, port):
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="ascii") as file:
        file.write(f"{port}\n")
    os.replace(temporary, path)
