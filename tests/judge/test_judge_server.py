import dataclasses
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest

from memcalib_jax.data import load_records, load_responses, sample_path
from memcalib_jax.judge import judge_messages, parse_judgment
from memcalib_jax.judge.server import MODEL_NAME, serve, stand_in_reply


@pytest.fixture(scope="module")
def server():
    with serve() as running:
        yield running


@contextmanager
def connection(server):
    connected = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        yield connected
    finally:
        connected.close()


def post(connected, body, path="/v1/chat/completions"):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connected.request("POST", path, content)
    answer = connected.getresponse()
    return answer.status, json.loads(answer.read())


def request(record, response):
    return {"model": MODEL_NAME, "messages": judge_messages(record, response)}


def test_completion_on_a_kept_connection(server, record):
    with connection(server) as connected:
        for _ in range(3):
            status, body = post(connected, request(record, "Your peanut allergy decides. Apples."))
            assert status == 200 and body["model"] == MODEL_NAME == "lexical-stand-in"
            socket_then = connected.sock
        assert connected.sock is socket_then is not None
    judgment = parse_judgment(body["choices"][0]["message"]["content"], record.atoms)
    assert judgment.levels == (2, 0, 0)
    assert judgment.details[0].evidence_quote == "Your peanut allergy decides."
    assert all("stand-in, no real judge" in detail.reason for detail in judgment.details)


def test_models(server):
    with urllib.request.urlopen(f"{server.base_url}/models") as answer:
        [model] = json.load(answer)["data"]
    assert model["id"] == MODEL_NAME and "no real judge" in model["owned_by"]


def messages(payload):
    return [{"role": "user", "content": json.dumps(payload)}]


PAYLOAD = {
    "query": "q",
    "memory_blocks": [{"id": "m", "text": "t"}],
    "response": "r",
    "atoms": [{"atom_id": "a", "text": "t", "u_star": "A"}],
}


@pytest.mark.parametrize(
    "body, status, said",
    [
        (b"", 400, "one JSON object"),
        (b"[]", 400, "one JSON object"),
        (b"\xff", 400, "one JSON object"),
        (b"[" * 100_000, 400, "one JSON object"),
        ({}, 404, MODEL_NAME),
        ({"model": "deepseek-v4-pro"}, 404, "stand-in"),
        ({"messages": []}, 400, "the last user message must be a string"),
        ({"messages": "hello"}, 400, "messages must be a list of objects"),
        ({"messages": [3]}, 400, "messages must be a list of objects"),
        ({"messages": [{"role": "user"}]}, 400, "must be a string"),
        ({"messages": [{"role": "user", "content": "hello"}]}, 400, "one JSON object"),
        ({"messages": messages([])}, 400, "one JSON object"),
        ({"messages": messages({**PAYLOAD, "query": 3})}, 400, "query must be a string"),
        ({"messages": messages({**PAYLOAD, "response": None})}, 400, "response must be a string"),
        ({"messages": messages({**PAYLOAD, "atoms": {}})}, 400, "atoms must be a list"),
        (
            {"messages": messages({**PAYLOAD, "atoms": [{"atom_id": "a", "u_star": "A"}]})},
            400,
            "atoms[0].text must be a string",
        ),
        (
            {"messages": messages({**PAYLOAD, "memory_blocks": ["t"]})},
            400,
            "memory_blocks[0].text must be a string",
        ),
        ({"messages": messages(PAYLOAD), "stream": True}, 400, "stream is not supported"),
    ],
)
def test_bad_requests_are_refused_and_the_connection_stays(server, body, status, said):
    if isinstance(body, dict) and "messages" in body:
        body = {"model": MODEL_NAME, **body}
    with connection(server) as connected:
        found, answer = post(connected, body)
        assert found == status and said in answer["error"]["message"]
        good = {"model": MODEL_NAME, "messages": messages(PAYLOAD)}
        assert post(connected, good)[0] == 200


def test_other_paths(server):
    with connection(server) as connected:
        assert post(connected, {}, "/v1/embeddings")[0] == 404
        connected.request("GET", "/")
        assert connected.getresponse().status == 404


@pytest.mark.parametrize("length", ["many", "-1", "99999999999999999999"])
def test_bad_length_ends_the_connection(server, length):
    with connection(server) as connected:
        connected.putrequest("POST", "/v1/chat/completions")
        connected.putheader("Content-Length", length)
        connected.endheaders()
        answer = connected.getresponse()
        assert answer.status == 400 and answer.getheader("Connection") == "close"


def test_last_user_message_counts(record):
    asked = request(record, "Your peanut allergy decides.")["messages"]
    asked = [{"role": "user", "content": "earlier"}, *asked, {"role": "assistant", "content": "x"}]
    assert parse_judgment(stand_in_reply(asked), record.atoms).levels == (2, 0, 0)


def test_levels_rubrics_and_actions_are_not_read():
    """Permutes them among the atoms of each record: the predicted levels stay."""
    rng = random.Random(11)
    records = {record.id: record for record in load_records(sample_path("records.jsonl"))}
    seen = set()
    for item in load_responses(sample_path("responses.jsonl")):
        record = records[item.record_id]
        shuffled = rng.sample(record.atoms, len(record.atoms))
        atoms = tuple(
            dataclasses.replace(atom, ideal=other.ideal, action=other.action, rubric=other.rubric)
            for atom, other in zip(record.atoms, shuffled, strict=True)
        )
        permuted = dataclasses.replace(record, atoms=atoms)
        found, again = (
            parse_judgment(stand_in_reply(judge_messages(it, item.text)), it.atoms)
            for it in (record, permuted)
        )
        assert found == again
        seen |= set(found.levels)
        assert permuted.atoms != record.atoms
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_program_serves_until_a_signal(tmp_path, name):
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "memcalib_jax.judge.server", "--port_file", str(port_file)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        line = process.stdout.readline()
        port = int(port_file.read_text())
        assert f"http://127.0.0.1:{port}/v1" in line and "no real judge" in line
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
            assert json.load(answer)["data"][0]["id"] == MODEL_NAME
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "", "")
    assert not port_file.exists()


def test_taken_port_is_said_without_a_trace(server):
    done = subprocess.run(
        [sys.executable, "-m", "memcalib_jax.judge.server", "--port", str(server.server_port)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"cannot serve on port {server.server_port}: ")
    assert "Traceback" not in done.stderr
