"""Serves the lexical stand-in as an OpenAI-compatible endpoint: no model, and no real judge.

    python -m memcalib_jax.judge.server --port 0 --port_file PATH

It lets a whole training or evaluation run without a judge model; its levels come from word overlap
(see `lexical.py`) and are no measure of a model.
"""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from memcalib_jax.data import LEVELS
from memcalib_jax.judge.lexical import lexical_footprints

MODEL_NAME = "lexical-stand-in"

_LARGEST_BODY = 16 * 2**20
_REASONS = (
    "Lexical stand-in, no real judge: too few words of the atom appear together.",
    "Lexical stand-in, no real judge: words of the atom appear late or thinly.",
    "Lexical stand-in, no real judge: words of the atom appear early or often.",
)


class LexicalServer(ThreadingHTTPServer):
    """Listens on 127.0.0.1; a thread a connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int):
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
def serve(port: int = 0) -> Iterator[LexicalServer]:
    """Serves the lexical stand-in from a thread of this process; port 0 takes a free one."""
    with LexicalServer(port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def stand_in_reply(messages: list[dict]) -> str:
    """Writes the reply of the lexical stand-in to a judge's messages.

    Reads the query, the memory texts, the atom texts and the response of the last user message;
    ideal levels are copied into the reply, and rubrics are not read.

    Raises:
      ValueError: the messages hold no such payload; the message says what is wrong.
    """
    payload = _payload(messages)
    atoms = payload["atoms"]
    footprints = lexical_footprints(
        payload["query"],
        [block["text"] for block in payload["memory_blocks"]],
        [atom["text"] for atom in atoms],
        payload["response"],
    )
    judgments = [
        {
            "atom_id": atom["atom_id"],
            "u_star": atom["u_star"],
            "predicted_usage_level": LEVELS[footprint.level],
            "evidence_quote": footprint.sentence,
            "reason": _REASONS[footprint.level],
        }
        for atom, footprint in zip(atoms, footprints, strict=True)
    ]
    return json.dumps({"atom_judgments": judgments}, ensure_ascii=False)


def _payload(messages):
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        raise ValueError("messages must be a list of objects")
    asked = [item.get("content") for item in messages if item.get("role") == "user"]
    if not asked or not isinstance(asked[-1], str):
        raise ValueError("the last user message must be a string")
    try:
        payload = json.loads(asked[-1])
    except (ValueError, RecursionError):
        raise ValueError("the last user message must be one JSON object") from None
    if not isinstance(payload, dict):
        raise ValueError("the last user message must be one JSON object")
    for name in ("query", "response"):
        if not isinstance(payload.get(name), str):
            raise ValueError(f"{name} must be a string")
    for name, fields in (("memory_blocks", ("text",)), ("atoms", ("atom_id", "text", "u_star"))):
        items = payload.get(name)
        if not isinstance(items, list):
            raise ValueError(f"{name} must be a list")
        for place, item in enumerate(items):
            for field in fields:
                if not isinstance(item, dict) or not isinstance(item.get(field), str):
                    raise ValueError(f"{name}[{place}].{field} must be a string")
    return payload


class _Refusal(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # One write an answer, sent at once: else each waits for the client's delayed acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self):
        if self.path != "/v1/models":
            return self._refuse(404, f"no such path: {self.path}")
        model = {"id": MODEL_NAME, "object": "model", "owned_by": "stand-in, no real judge"}
        self._answer(200, {"object": "list", "data": [model]})

    def do_POST(self):
        try:
            body = self._read_body()
            if self.path != "/v1/chat/completions":
                raise _Refusal(404, f"no such path: {self.path}")
            self._answer(200, _completion(body))
        except _Refusal as refusal:
            self._refuse(refusal.status, str(refusal))

    def _read_body(self):
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length[:12]) > _LARGEST_BODY:
            self.close_connection = True  # What follows is a body that nobody reads.
            raise _Refusal(400, f"Content-Length must be a number up to {_LARGEST_BODY}")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise _Refusal(400, "the body must be one JSON object")
        return body

    def _refuse(self, status, message):
        self._answer(status, {"error": {"message": message, "type": "invalid_request_error"}})

    def _answer(self, status, value):
        # ASCII, so that any text, lone surrogates too, can be sent.
        content = json.dumps(value).encode("ascii")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        """Keeps quiet about single requests."""


def _completion(body):
    if body.get("model") != MODEL_NAME:
        raise _Refusal(
            404, f"this server is a stand-in, and {MODEL_NAME!r} the only model that it has"
        )
    if body.get("stream"):
        raise _Refusal(400, "stream is not supported")
    try:
        content = stand_in_reply(body.get("messages"))
    except ValueError as error:
        raise _Refusal(400, str(error)) from None
    message = {"role": "assistant", "content": content}
    return {
        "object": "chat.completion",
        "model": MODEL_NAME,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }


def main(arguments: list[str] | None = None) -> None:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m memcalib_jax.judge.server",
        description="Serve the lexical stand-in on 127.0.0.1. It is no real judge.",
    )
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--port_file", help="file that gets the port once the server listens")
    options = parser.parse_args(arguments)
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    try:
        with serve(options.port) as server:
            if options.port_file:
                _write_port(options.port_file, server.server_port)
            print(
                f"{MODEL_NAME} listens on {server.base_url}: a stand-in for demonstrations and "
                "tests, no real judge",
                flush=True,
            )
            stop.wait()
    except (OSError, OverflowError) as error:
        sys.exit(f"cannot serve on port {options.port}: {error}")
    finally:
        if options.port_file and os.path.exists(options.port_file):
            os.unlink(options.port_file)


def _write_port(path, port):
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="ascii") as file:
        file.write(f"{port}\n")
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
