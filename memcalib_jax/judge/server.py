"""Serves the lexical stand-in, or a model, as an OpenAI-compatible endpoint.

    python -m memcalib_jax.judge.server --port 0 --port_file PATH
    python -m memcalib_jax.judge.server --port 8000 --model_path=/models/Qwen3-8B

The stand-in is no model, and no real judge. It lets a whole training or evaluation run without a
judge model; its levels come from word overlap (see `lexical.py`) and are no measure of a model.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memcalib_jax.api.server import (
    ChatServer,
    add_port_options,
    last_user_object,
    serve_until_signal,
    serving,
)
from memcalib_jax.data import LEVELS
from memcalib_jax.judge.lexical import lexical_footprints

MODEL_NAME = "lexical-stand-in"

_OWNER = "stand-in, no real judge"
_REASONS = (
    "Lexical stand-in, no real judge: too few words of the atom appear together.",
    "Lexical stand-in, no real judge: words of the atom appear late or thinly.",
    "Lexical stand-in, no real judge: words of the atom appear early or often.",
)


def stand_in_server(port: int) -> ChatServer:
    """Makes a server of the lexical stand-in."""
    return ChatServer(port, {MODEL_NAME: _OWNER}, lambda body: stand_in_reply(body.get("messages")))


@contextmanager
def serve(port: int = 0) -> Iterator[ChatServer]:
    """Serves the lexical stand-in from a thread of this process; port 0 takes a free one."""
    with serving(stand_in_server(port)) as server:
        yield server


def stand_in_reply(messages: list[dict]) -> str:
    """Writes the reply of the lexical stand-in to a judge's messages.

    Reads the query, the memory texts, the atom texts and the response of the last user message;
    ideal levels are copied into the reply, if there are any, and rubrics are not read.

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
            **{key: atom[key] for key in ("atom_id", "u_star") if key in atom},
            "predicted_usage_level": LEVELS[footprint.level],
            "evidence_quote": footprint.sentence,
            "reason": _REASONS[footprint.level],
        }
        for atom, footprint in zip(atoms, footprints, strict=True)
    ]
    return json.dumps({"atom_judgments": judgments}, ensure_ascii=False)


def _payload(messages):
    payload = last_user_object(messages)
    for name in ("query", "response"):
        if not isinstance(payload.get(name), str):
            raise ValueError(f"{name} must be a string")
    for name, fields in (("memory_blocks", ("text",)), ("atoms", ("atom_id", "text"))):
        items = payload.get(name)
        if not isinstance(items, list):
            raise ValueError(f"{name} must be a list")
        for place, item in enumerate(items):
            for field in fields:
                if not isinstance(item, dict) or not isinstance(item.get(field), str):
                    raise ValueError(f"{name}[{place}].{field} must be a string")
    return payload


def main(arguments: list[str] | None = None) -> None:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m memcalib_jax.judge.server",
        description="Serve the lexical stand-in, which is no real judge, or a model on 127.0.0.1.",
    )
    add_port_options(parser)
    parser.add_argument("--model_path", help="Hugging Face folder, its name on the hub, or .gguf "
                        "file of a model to serve in place of the stand-in")
    parser.add_argument("--model_name", help="name of the model for clients; default: its folder's")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--max_response_tokens", type=_positive, default=2048)
    parser.add_argument("--largest_batch", type=_positive, default=64,
                        help="most requests that are sampled together")
    parser.add_argument("--most_waiting", type=_positive, default=256,
                        help="most requests that wait; more are refused with HTTP 503")
    options = parser.parse_args(arguments)
    if options.model_path is None:
        serve_until_signal(stand_in_server, options,
                           "a stand-in for demonstrations and tests, no real judge")
    else:
        _serve_model(options)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _serve_model(options):
    # Only here: whoever judges with an endpoint needs no jax.
    from memcalib_jax.judge.model_server import ModelServer, load_model
    from memcalib_jax.models import ModelError

    try:
        model = ModelServer(*load_model(options.model_path, options.dtype),
                            max_response_tokens=options.max_response_tokens,
                            largest_batch=options.largest_batch,
                            most_waiting=options.most_waiting)
    except ModelError as error:
        sys.exit(f"cannot serve --model_path={options.model_path}: {error}")
    name = options.model_name or Path(options.model_path).stem
    serve_until_signal(lambda port: model.server(port, name), options,
                       "a model, sampled on this machine's devices")
    model.close()


if __name__ == "__main__":
    main()
