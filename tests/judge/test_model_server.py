"""A model of ours behind the endpoint: answers as the sampler does, to many at once."""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request

import jax
import pytest
from random_models import random_params

from memcalib_jax.api import ChatClient, ChatError, ChatSettings
from memcalib_jax.api.server import serving
from memcalib_jax.judge.batching import Batches, Full
from memcalib_jax.judge.model_server import ModelServer
from memcalib_jax.models import ModelConfig
from memcalib_jax.sampling import sample

CONFIG = ModelConfig("llama", 61, 16, 24, 2, 4, 2, 4, eos_ids=(1,), max_positions=160)


class Letters:
    """A tokenizer of single characters, ids 2 to 60."""

    chat_template = "yes"
    bos_token_id = None

    def apply_chat_template(self, messages, **_):
        return "".join(message["content"] for message in messages)

    def encode(self, text, **_):
        return [2 + ord(letter) % 59 for letter in text]

    def decode(self, tokens, **_):
        return " ".join(map(str, tokens))


PARAMS = random_params(CONFIG)


@pytest.fixture(scope="module")
def model():
    model = ModelServer(PARAMS, CONFIG, Letters(), max_response_tokens=12)
    yield model
    model.close()


@pytest.fixture(scope="module")
def server(model):
    with serving(model.server(0, "tiny")) as running:
        yield running


def post(server, **body):
    request = urllib.request.Request(
        f"{server.base_url}/chat/completions", json.dumps({"model": "tiny"} | body).encode())
    try:
        with urllib.request.urlopen(request, timeout=100) as answer:
            return answer.status, json.load(answer), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers


def messages(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.8, "seed": 5},
                                      {"temperature": 1, "top_p": 0.7, "max_tokens": 5}])
def test_it_answers_as_the_sampler_does(server, model, settings):
    body = {"messages": messages("Which way to the harbour?")} | settings
    asked = model.read(body)
    [[expected]] = sample(PARAMS, CONFIG, [asked.prompt], num_samples=1,
                          max_tokens=settings.get("max_tokens", 12), key=jax.random.key(0),
                          temperature=settings["temperature"], top_p=settings.get("top_p", 1.0),
                          stop_ids=(1,), request_ids=[asked.request_id])
    status, answer, _ = post(server, **body)
    choice = answer["choices"][0]
    tokens = [token for token in expected.tokens if token != 1]
    assert status == 200
    assert choice["message"]["content"] == " ".join(map(str, tokens))
    assert choice["finish_reason"] == expected.finish_reason
    assert answer["usage"]["prompt_tokens"] == len(asked.prompt) == 25
    assert answer["usage"]["completion_tokens"] == len(expected.tokens)


def test_seeds_and_messages_draw_apart(model):
    def id_of(text, **more):
        return model.read({"messages": messages(text)} | more).request_id

    assert id_of("a") == id_of("a") == id_of("a", seed=0)
    assert len({id_of("a"), id_of("b"), id_of("a", seed=1)}) == 3


def test_64_clients_at_once_are_all_answered_as_alone(server):
    async def ask_all():
        settings = ChatSettings(server.base_url, "tiny", max_tokens=8, requests_per_minute=9999)
        async with ChatClient(settings, api_key="") as client:
            return await asyncio.gather(*(client.complete(messages(f"Question {number}"),
                                                          allow_empty=True)
                                          for number in range(64)))

    together = asyncio.run(ask_all())
    for number in (0, 17, 63):
        _, alone, _ = post(server, messages=messages(f"Question {number}"), temperature=0,
                           max_tokens=8)
        assert together[number].text == alone["choices"][0]["message"]["content"]
    assert all(reply.attempts == 1 for reply in together)


@pytest.mark.parametrize("body, said", [
    ({}, "messages must be a list"), ({"messages": []}, "messages must be a list"),
    ({"messages": [{"role": "user"}]}, "role and content"),
    ({"messages": messages("x"), "n": 2}, "n is not supported"),
    ({"messages": messages("x"), "response_format": {"type": "json_object"}},
     "response_format is not supported"),
    ({"messages": messages("x"), "temperature": 3}, "temperature must lie in [0, 2]"),
    ({"messages": messages("x"), "temperature": "hot"}, "temperature must lie in [0, 2]"),
    ({"messages": messages("x"), "top_p": 0}, "top_p must lie in"),
    ({"messages": messages("x"), "max_tokens": 0}, "max_tokens must be a whole number"),
    ({"messages": messages("x" * 200)}, "200 tokens, and the model 160 positions"),
])
def test_what_it_cannot_do_is_said(server, body, said):
    status, answer, _ = post(server, **body)
    assert status == 400 and said in answer["error"]["message"]


def test_a_reply_has_the_room_that_the_prompt_leaves(server):
    _, answer, _ = post(server, messages=messages("x" * 157), temperature=1)
    assert answer["usage"]["completion_tokens"] <= 3


def test_a_full_server_says_so_and_when_to_come_back(monkeypatch):
    model = ModelServer(PARAMS, CONFIG, Letters(), largest_batch=1, most_waiting=1)
    running, released = threading.Event(), threading.Event()

    def hold(jobs):
        running.set()
        released.wait(30)

    monkeypatch.setattr(model._batches, "_run", hold)
    with serving(model.server(0, "tiny")) as server:
        threads = []
        for number in range(2):  # One is held, the next waits.
            threads.append(threading.Thread(target=post, args=(server,),
                                            kwargs={"messages": messages(str(number))}))
            threads[-1].start()
            running.wait(10)
        while not model._batches._waiting:
            time.sleep(0.01)
        status, answer, headers = post(server, messages=messages("x"))
        assert status == 503 and headers["Retry-After"] == "1"
        assert "too many requests wait" in answer["error"]["message"]
        released.set()
        for thread in threads:
            thread.join(30)
    model.close()


def test_a_model_that_fails_is_a_server_error(monkeypatch):
    model = ModelServer(PARAMS, CONFIG, Letters())

    def fail(jobs):
        raise FloatingPointError("the logits are not finite")

    monkeypatch.setattr(model._batches, "_run", fail)
    with serving(model.server(0, "tiny")) as server:
        settings = ChatSettings(server.base_url, "tiny", max_attempts=1)
        with pytest.raises(ChatError, match="the logits are not finite") as caught:
            asyncio.run(ChatClient(settings, api_key="").complete(messages("x")))
    assert caught.value.kind == "http_5xx"
    model.close()


def test_the_oldest_request_is_always_in_the_next_batch():
    batches_run, running, go = [], threading.Event(), threading.Event()

    def run(jobs):
        running.set()
        go.wait(10)
        batches_run.append([job.request for job in jobs])
        for job in jobs:
            job.future.set_result(job.request)

    batches = Batches(run, largest=3, most_waiting=8)
    futures = [batches.submit("a", 0)]
    running.wait(10)
    futures += [batches.submit(kind, number) for number, kind in enumerate("babbabb", start=1)]
    go.set()
    assert [future.result(10) for future in futures] == list(range(8))
    assert batches_run == [[0], [1, 3, 4], [2, 5], [6, 7]]
    batches.close()
    with pytest.raises(Full):
        batches.submit("a", 9)
