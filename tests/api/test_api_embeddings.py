"""Embeddings over HTTP: order, parts, retries and what is given up."""

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from memcalib_jax.api import BackgroundLoop, ChatSettings
from memcalib_jax.api.embeddings import TEXTS_A_REQUEST, EmbeddingClient
from memcalib_jax.memory.retrieval import CachedEncoder, EmbeddingError, EndpointEncoder


@contextmanager
def endpoint(answer):
    """Serves `answer(texts) -> (status, value)`; yields the base URL and the requests' texts."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/embeddings" and body["model"] == "embedder"
            asked.append(body["input"])
            status, value = answer(body["input"])
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()
        thread.join()


def by_length(texts):
    """Answers with (length, 1), the last first."""
    rows = [{"index": i, "embedding": [float(len(t)), 1.0]} for i, t in enumerate(texts)]
    return 200, {"data": rows[::-1], "usage": {"prompt_tokens": 1}}


def client_of(url, **settings):
    return EmbeddingClient(ChatSettings(url, "embedder", requests_per_minute=10_000, **settings),
                           api_key="")


def embed(client, texts):
    async def run():
        try:
            return await client.embed(texts)
        finally:
            await client.aclose()

    return asyncio.run(run())


def test_vectors_come_in_the_order_of_the_texts_whatever_the_answers():
    texts = ["x" * n for n in range(2 * TEXTS_A_REQUEST + 1)]
    with endpoint(by_length) as (url, asked):
        client = client_of(url)
        vectors = embed(client, texts)
    np.testing.assert_array_equal(vectors, [[n, 1] for n in range(len(texts))])
    assert sorted(map(len, asked)) == [1, TEXTS_A_REQUEST, TEXTS_A_REQUEST]
    assert client.counts == {"texts": len(texts), "requests": 3}


@pytest.mark.parametrize("status, value", [
    (400, {"error": "no"}), (200, {"data": []}), (200, {"data": [{"index": 0}]}), (200, []),
    (200, {"data": [{"index": 1, "embedding": [1.0]}]}),
    (200, {"data": [{"index": 0, "embedding": [None]}]}),
    (200, {"data": [{"index": 0, "embedding": []}]})])
def test_what_is_given_up_is_none_and_counted(status, value):
    with endpoint(lambda texts: (status, value)) as (url, _):
        client = client_of(url, max_attempts=1)
        assert embed(client, ["a"]) == [None]
    assert client.counts == {"texts": 1, "requests": 1, "failed_texts": 1}


def test_a_server_error_is_asked_again(monkeypatch):
    monkeypatch.setattr("memcalib_jax.api.embeddings.backoff_seconds", lambda *_: 0.0)
    statuses = iter([500, 503, 200])

    def answer(texts):
        status = next(statuses)
        return by_length(texts) if status == 200 else (status, {})

    with endpoint(answer) as (url, asked):
        client = client_of(url)
        np.testing.assert_array_equal(embed(client, ["abc"]), [[3, 1]])
    assert len(asked) == 3 and client.counts["retries"] == 2


def test_the_encoder_keeps_what_came_and_asks_again_for_what_failed():
    calls = []

    def answer(texts):
        calls.append(texts)
        good = [t for t in texts if t != "bad" or len(calls) > 2]
        return by_length(texts) if good == texts else (400, {})

    with endpoint(answer) as (url, _), BackgroundLoop() as loop:
        client = client_of(url, max_attempts=1)
        encoder = CachedEncoder(EndpointEncoder(client, loop))
        assert encoder.embed(["aaa"]).shape == (1, 2)
        with pytest.raises(EmbeddingError, match="embedded none of 1 texts"):
            encoder.embed(["aaa", "bad"])
        np.testing.assert_allclose(encoder.embed(["bad", "aaa"]), np.array(
            [[3, 1], [3, 1]]) / 10**0.5, rtol=1e-6)
        loop.submit(client.aclose()).result()
    assert calls == [["aaa"], ["bad"], ["bad"]]


def test_a_failed_part_is_zeros_and_is_not_kept(monkeypatch):
    monkeypatch.setattr("memcalib_jax.api.embeddings.TEXTS_A_REQUEST", 1)
    fails = {"b"}
    with endpoint(lambda texts: (400, {}) if texts[0] in fails else by_length(texts)) as (
            url, asked), BackgroundLoop() as loop:
        client = client_of(url, max_attempts=1)
        encoder = CachedEncoder(EndpointEncoder(client, loop))
        np.testing.assert_array_equal(encoder.embed(["a", "b"])[1], [0, 0])
        fails.clear()
        assert encoder.embed(["a", "b"])[1].any()
        loop.submit(client.aclose()).result()
    assert sorted(map(tuple, asked)) == [("a",), ("b",), ("b",)]
    assert client.counts["failed_texts"] == 1


def test_another_dimension_is_refused():
    sizes = iter([2, 3])

    def answer(texts):
        size = next(sizes)
        return 200, {"data": [{"index": i, "embedding": [1.0] * size} for i in range(len(texts))]}

    with endpoint(answer) as (url, _), BackgroundLoop() as loop:
        client = client_of(url)
        encoder = CachedEncoder(EndpointEncoder(client, loop))
        encoder.embed(["a"])
        with pytest.raises(EmbeddingError, match="3 dimensions now and had 2 before"):
            encoder.embed(["b"])
        loop.submit(client.aclose()).result()
