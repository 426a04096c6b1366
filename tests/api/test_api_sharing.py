"""One asks, the others wait: over tasks, clients and processes; hedging; forms of a reply."""

import asyncio
import errno
import fcntl
import signal
import subprocess
import sys
import time

import pytest

from memcalib_jax.api import ChatClient, ChatError, ChatSettings
from memcalib_jax.api.cache import ReplyCache

MESSAGES = [{"role": "user", "content": "x"}]


def test_equal_requests_of_two_clients_are_asked_once(endpoint, steps, tmp_path):
    def slow(handler):
        time.sleep(0.15)
        return 200, steps.completion("slow")

    endpoint.script = [slow]

    async def run():
        clients = [ChatClient(ChatSettings(endpoint.base_url, "m", cache_dir=tmp_path), api_key="")
                   for _ in range(2)]
        replies = await asyncio.gather(*(client.complete(MESSAGES)
                                         for client in clients for _ in range(3)))
        for client in clients:
            await client.aclose()
        return replies

    replies = asyncio.run(run())
    assert [reply.text for reply in replies] == ["slow"] * 6
    assert sorted(reply.cached for reply in replies) == [False] + [True] * 5
    assert len(endpoint.requests) == 1


def test_who_waits_asks_when_the_asker_fails(endpoint, steps, tmp_path):
    endpoint.script = [(400, "no"), (200, steps.completion("yes"))]

    async def run():
        async with ChatClient(ChatSettings(endpoint.base_url, "m", cache_dir=tmp_path),
                              api_key="") as client:
            return await asyncio.gather(client.complete(MESSAGES), client.complete(MESSAGES),
                                        return_exceptions=True)

    first, second = asyncio.run(run())
    assert isinstance(first, ChatError) and second.text == "yes"


_HOLDER = """
import sys, time
from memcalib_jax.api.cache import ReplyCache
cache = ReplyCache(sys.argv[1])
assert cache.claim("ab" + "0" * 62)
print("held", flush=True)
time.sleep(60)
"""


def test_a_dead_process_gives_its_claims_back(tmp_path):
    cache, key = ReplyCache(tmp_path), "ab" + "0" * 62
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path)],
                              stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        assert not cache.claim(key)
        assert cache.claim("cd" + "0" * 62)  # Of another reply there is no holder.
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        assert cache.claim(key)
        assert not cache.claim(key)
        cache.release(key)
        assert cache.claim(key)
    finally:
        holder.kill()


def test_a_file_system_without_locks_still_serves_one_process(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    cache = ReplyCache(tmp_path)
    assert cache.claim("ab" + "1" * 62) and not cache.claim("ab" + "1" * 62)
    cache.release("ab" + "1" * 62)
    assert cache.claim("ab" + "1" * 62)


def hedged(endpoint, after, **settings):
    async def run():
        settings_ = ChatSettings(endpoint.base_url, "m", hedge_after=after, **settings)
        async with ChatClient(settings_, api_key="") as client:
            return await client.complete(MESSAGES), client.stats()

    return asyncio.run(run())


def test_a_slow_answer_is_hedged_and_the_first_good_one_wins(endpoint, steps):
    endpoint.script = [steps.hang, (200, steps.completion("second"))]
    reply, stats = hedged(endpoint, 0.1)
    assert (reply.text, stats["hedges"], len(endpoint.requests)) == ("second", 1, 2)


def test_a_quick_answer_is_not_hedged(endpoint):
    reply, stats = hedged(endpoint, 5.0)
    assert (stats["hedges"], len(endpoint.requests)) == (0, 1)


def test_a_hedge_that_fails_leaves_the_first(endpoint, steps):
    def slow(handler):
        time.sleep(0.4)
        return 200, steps.completion("first")

    endpoint.script = [slow, (500, "oops")]
    reply, _ = hedged(endpoint, 0.1, max_attempts=1)
    assert reply.text == "first"


def test_hedging_is_off_by_default(endpoint):
    assert ChatSettings(endpoint.base_url, "m").hedge_after is None
    with pytest.raises(ValueError, match="hedge_after"):
        ChatSettings(endpoint.base_url, "m", hedge_after=0.0)


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def forms(endpoint, open_client, count=2, **options):
    client = open_client(**options)

    async def run():
        for index in range(count):
            await client.complete(MESSAGES, schema=SCHEMA, sample_index=index)

    asyncio.run(run())
    return [body.get("response_format", {}).get("type") for _, _, _, body in endpoint.requests]


def test_a_schema_is_sent_where_one_is_asked_for(endpoint, open_client):
    assert forms(endpoint, open_client, 1) == ["json_schema"]
    sent = endpoint.requests[0][3]["response_format"]["json_schema"]
    assert sent == {"name": "reply", "strict": True, "schema": SCHEMA}


def test_an_endpoint_without_schemas_is_asked_for_an_object_and_then_for_nothing(
        endpoint, open_client):
    endpoint.script = [(400, "This response_format type is unavailable now"),
                       (422, "unknown field response_format")]
    assert forms(endpoint, open_client) == ["json_schema", "json_object", None, None]


def test_a_schema_is_part_of_the_key(endpoint, open_client, tmp_path):
    async def run():
        async with open_client(cache_dir=tmp_path) as client:
            asked = (SCHEMA, None, SCHEMA)
            return [(await client.complete(MESSAGES, schema=schema)).cached for schema in asked]

    assert asyncio.run(run()) == [False, False, True]


def test_an_answer_without_end_is_cut(endpoint, open_client, monkeypatch):
    from memcalib_jax.api import connections

    monkeypatch.setattr(connections, "_LARGEST_ANSWER", 1000)
    endpoint.script = [(200, "x" * 5000)]
    with pytest.raises(ChatError, match="longer than 1000 bytes"):
        asyncio.run(open_client(max_attempts=1).complete(MESSAGES))
