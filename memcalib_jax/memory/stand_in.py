"""Serves a stand-in of every memory role as an OpenAI-compatible endpoint; it is no model.

    python -m memcalib_jax.memory.stand_in --port=8010

It takes every turn for a fact and keeps every fact, answers with the memory that shares most words
with the question, and calls an answer right that holds most words of the reference: enough to see
the programs work, and no measure of anything.
"""

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from memcalib_jax.api.server import (
    ChatServer, add_port_options, last_user_message, serve_until_signal, serving)
from memcalib_jax.memory.rewards import answer_tokens

MODEL_NAME = "memory-stand-in"

_TURN = re.compile(r"^\[(D\d+:\d+)\] ([^:\n]+): (.*)$", re.MULTILINE)
_MEMORY = re.compile(r"^- \[[^\]]*\] (.*)$", re.MULTILINE)
_QUESTION = "\n\nQuestion: "


def stand_in_reply(messages: list[dict]) -> str:
    """Writes the reply to a role's messages; which role it is shows in the last.

    Raises:
      ValueError: they are those of no role.
    """
    asked = last_user_message(messages)
    payload = _object(asked)
    if "reference" in payload:
        return json.dumps({"label": _label(payload)})
    if _QUESTION in asked:
        return _answer(*asked.rsplit(_QUESTION, 1))
    if "facts" in payload:
        return _insert((fact["speaker"], fact["fact"], fact["dia_id"])
                       for fact in payload["facts"])
    turns = [(speaker, text, dia_id) for dia_id, speaker, text in _TURN.findall(asked)]
    if "memories" in payload:
        return _insert(turns)
    if not turns and "(no further turn)" not in asked:
        raise ValueError("the last user message is that of no memory role")
    return json.dumps({"facts": [{"speaker": speaker, "dia_id": dia_id, "fact": text}
                                 for speaker, text, dia_id in turns]})


def _object(text: str) -> dict:
    """Returns the object that a text ends with; an empty one where there is none."""
    start = text.find('{"')
    try:
        return json.loads(text[start:]) if start >= 0 else {}
    except ValueError:
        return {}


def _insert(facts) -> str:
    return json.dumps({"operations": [
        {"operation": "INSERT", "speaker": speaker, "content": content, "dia_id": dia_id}
        for speaker, content, dia_id in facts]})


def _answer(memories: str, question: str) -> str:
    wanted = set(answer_tokens(question))
    found = max(_MEMORY.findall(memories), default="",
                key=lambda memory: len(wanted & set(answer_tokens(memory))))
    return f"The closest memory says it. <answer>{found}</answer>"


def _label(payload: dict) -> str:
    reference = answer_tokens(str(payload["reference"]))
    answer = set(answer_tokens(str(payload.get("answer"))))
    held = sum(token in answer for token in reference)
    return "CORRECT" if 2 * held > len(reference) else "WRONG"


def stand_in_server(port: int) -> ChatServer:
    """Makes a server of the stand-in."""
    return ChatServer(port, {MODEL_NAME: "stand-in, no model"},
                      lambda body: stand_in_reply(body.get("messages")))


@contextmanager
def serve(port: int = 0) -> Iterator[ChatServer]:
    """Serves from a thread of this process; port 0 takes a free one."""
    with serving(stand_in_server(port)) as server:
        yield server


def main(arguments: list[str] | None = None) -> None:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m memcalib_jax.memory.stand_in",
        description="Serve a stand-in of every memory role on 127.0.0.1; it is no model.")
    add_port_options(parser)
    serve_until_signal(stand_in_server, parser.parse_args(arguments),
                       "a stand-in for demonstrations and tests, no model")


if __name__ == "__main__":
    main()
