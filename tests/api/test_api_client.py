import asyncio
import json
import logging
import socket
import threading
import traceback
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from memcalib_jax.api import ChatClient, ChatError, ChatSettings, Stopped

MESSAGES = [{"role": "user", "content": "Grüße"}]
KEY = "sk-very-secret-0123456789"


def ask(client, count=1, **options):
    """Asks `count` times at once and returns the replies, or raises the first error."""

    async def run():
        async with client:
            return await asyncio.gather(
                *(client.complete(MESSAGES, sample_index=i, **options) for i in range(count))
            )

    replies = asyncio.run(run())
    return replies[0] if count == 1 else replies


def failure(client, **options):
    with pytest.raises(ChatError) as caught:
        ask(client, **options)
    return caught.value


def whole_number(text):
    if not text.isdigit():
        raise ValueError(f"{text!r} is no number")
    return int(text)


def test_request_and_reply(endpoint, open_client, steps):
    usage = {"prompt_tokens": 11, "completion_tokens": 5}
    endpoint.script = [(200, steps.completion("42", usage=usage))]
    client = open_client(KEY, temperature=0.5, max_tokens=7)
    reply = ask(client, check=whole_number)
    assert (reply.text, reply.parsed, reply.cached, reply.attempts) == ("42", 42, False, 1)
    assert (reply.prompt_tokens, reply.completion_tokens) == (11, 5)
    [(method, path, headers, body)] = endpoint.requests
    assert (method, path) == ("POST", "/v1/chat/completions")
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert headers["Content-Type"] == "application/json"
    assert body == {
        "model": "m",
        "messages": MESSAGES,
        "temperature": 0.5,
        "max_tokens": 7,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    stats = client.stats()
    assert (stats["requests"], stats["attempts"], stats["retries"]) == (1, 1, 0)
    assert (stats["prompt_tokens"], stats["completion_tokens"]) == (11, 5)
    assert 0.0 < stats["latency_mean"] <= stats["latency_p95"] + 1e-9
    assert set(stats["failures"].values()) == {0}


def test_any_text_can_be_sent(endpoint, open_client):
    odd = "\ud800 \x00 \u2028 \U0001f600"

    async def run():
        async with open_client() as client:
            await client.complete([{"role": "user", "content": odd}])

    asyncio.run(run())
    assert endpoint.requests[0][3]["messages"][0]["content"] == odd


def test_no_key_sends_no_authorization(endpoint, open_client):
    ask(open_client())
    assert "authorization" not in {name.lower() for name in endpoint.requests[0][2]}


def test_server_errors_back_off_exponentially(endpoint, open_client, fake_time):
    endpoint.script = [(500, "oops"), (503, "busy")]
    client = open_client()
    assert ask(client).attempts == 3
    assert fake_time.slept == [1.75, 3.25]  # 1.5 * 2**k + 0.25
    stats = client.stats()
    assert (stats["attempts"], stats["retries"], stats["waits"]) == (3, 2, 2)
    assert stats["waited_seconds"] == 5.0
    assert stats["failed_attempts"]["http_5xx"] == 2
    assert stats["failures"]["http_5xx"] == 0


def test_attempts_are_bounded(endpoint, open_client, fake_time):
    endpoint.script = [(500, "oops")] * 9
    client = open_client()
    error = failure(client)
    assert error.kind == "http_5xx" and str(error) == "HTTP 500: oops"
    assert len(endpoint.requests) == 4
    assert fake_time.slept == [1.75, 3.25, 6.25]
    assert client.stats()["failures"]["http_5xx"] == 1


def test_retry_after_seconds(endpoint, open_client, fake_time):
    endpoint.script = [(429, "slow down", {"Retry-After": "7"})]
    assert ask(open_client()).attempts == 2
    assert fake_time.slept == [7.25]


def test_retry_after_date(endpoint, open_client, fake_time):
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=200), usegmt=True)
    endpoint.script = [(503, "busy", {"Retry-After": date})]
    ask(open_client())
    assert 150.0 < fake_time.slept[0] < 200.5


def test_retry_after_beyond_the_timeout_gives_up(endpoint, open_client, fake_time):
    endpoint.script = [(429, "quota", {"Retry-After": "3600"})]
    error = failure(open_client())
    assert error.kind == "rate_limit" and "3600 s" in str(error)
    assert len(endpoint.requests) == 1 and fake_time.slept == []


@pytest.mark.parametrize("status, kind", [(408, "timeout"), (409, "http_4xx"), (429, "rate_limit")])
def test_passing_4xx_is_asked_again(endpoint, open_client, status, kind):
    endpoint.script = [(status, "later")]
    client = open_client()
    assert ask(client).attempts == 2
    assert client.stats()["failed_attempts"][kind] == 1


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 413, 422])
def test_other_refusals_fail_at_once(endpoint, open_client, fake_time, status):
    endpoint.script = [(status, "no", {"Location": "/v1/elsewhere"})]
    error = failure(open_client())
    assert (error.kind, error.status) == ("http_4xx", status)
    assert len(endpoint.requests) == 1 and fake_time.slept == []


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_deadline_is_for_the_whole_attempt(endpoint, open_client, steps, fault):
    endpoint.script = [getattr(steps, fault)] * 2
    error = failure(open_client(timeout=0.2, max_attempts=2))
    assert error.kind == "timeout" and str(error) == "no answer within 0.2 s"
    assert len(endpoint.requests) == 2


def test_timeout_then_good_on_one_slot(endpoint, open_client, steps):
    endpoint.script = [steps.hang]
    reply = ask(open_client(timeout=0.3, max_concurrent=1))
    assert (reply.text, reply.attempts) == ("good", 2)


def test_reset_connection_is_asked_again(endpoint, open_client, steps):
    endpoint.script = [steps.reset]
    client = open_client(max_concurrent=1)
    assert ask(client).attempts == 2
    assert client.stats()["failed_attempts"]["network"] == 1


def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        client = ChatClient(ChatSettings(url, "m", max_attempts=1), api_key="")
        assert failure(client).kind == "network"
        with pytest.raises(ChatError, match=f"cannot use {url}.*server is running"):
            asyncio.run(client.probe())


def test_bad_reply_is_asked_again_and_not_kept(endpoint, open_client, steps, tmp_path):
    endpoint.script = [(200, steps.completion("many")), (200, steps.completion("12"))]
    client = open_client(cache_dir=tmp_path)
    reply = ask(client, check=whole_number)
    assert (reply.parsed, reply.attempts) == (12, 2)
    [entry] = tmp_path.rglob("*.json")
    assert json.loads(entry.read_text())["text"] == "12"
    assert client.stats()["failed_attempts"]["parse"] == 1


def test_bad_replies_only(endpoint, open_client, steps, tmp_path):
    endpoint.script = [(200, steps.completion("many", finish_reason="length"))] * 4
    error = failure(open_client(cache_dir=tmp_path), check=whole_number)
    assert error.kind == "parse"
    assert str(error) == "bad reply: 'many' is no number (it was cut at max_tokens)"
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize(
    "body, kind",
    [
        ("not json", "parse"),
        ("[" * 100_000, "parse"),
        ([], "parse"),
        ({"choices": []}, "parse"),
        ({"choices": [{"message": {"content": 3}}]}, "parse"),
        ({"choices": [{"message": {"content": None}}]}, "empty"),
        ({"choices": [{"message": {"content": " \n"}}]}, "empty"),
    ],
)
def test_no_completion(endpoint, open_client, body, kind):
    endpoint.script = [(200, body)]
    assert failure(open_client(max_attempts=1)).kind == kind


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None}, {"prompt_tokens": "9"}])
def test_missing_usage_counts_nothing(endpoint, open_client, steps, usage):
    endpoint.script = [(200, steps.completion("x", usage=usage))]
    assert ask(open_client()).prompt_tokens == 0


def test_concurrency_reaches_the_limit_and_no_more(endpoint, open_client, steps):
    barrier = threading.Barrier(3)  # Passes only while three are in flight together.

    def together(handler):
        barrier.wait(10)
        return 200, steps.completion()

    endpoint.script = [together] * 12
    assert len(ask(open_client(max_concurrent=3), count=12)) == 12
    assert endpoint.most_in_flight == 3


def test_rate_limit_spreads_requests_over_minutes(endpoint, open_client, fake_time):
    client = open_client(requests_per_minute=2)
    ask(client, count=5)
    assert fake_time.slept == [60.0, 60.0]
    assert len(endpoint.requests) == 5
    # The third and the fourth wait a minute, the fifth two.
    assert (client.stats()["waits"], client.stats()["waited_seconds"]) == (3, 240.0)


def test_cache_hit_pays_nothing(endpoint, open_client, tmp_path):
    first = ask(open_client(cache_dir=tmp_path))
    client = open_client(cache_dir=tmp_path)
    again = ask(client)
    assert (first.cached, again.cached) == (False, True)
    assert (again.text, again.attempts, again.prompt_tokens) == ("good", 0, 0)
    assert len(endpoint.requests) == 1
    stats = client.stats()
    assert (stats["requests"], stats["attempts"], stats["cache_hits"]) == (1, 0, 1)


def test_cached_reply_that_fails_the_check_is_replaced(endpoint, open_client, steps, tmp_path):
    endpoint.script = [(200, steps.completion("old")), (200, steps.completion("7"))]
    ask(open_client(cache_dir=tmp_path))
    assert ask(open_client(cache_dir=tmp_path), check=whole_number).parsed == 7
    assert ask(open_client(cache_dir=tmp_path), check=whole_number).cached


@pytest.mark.parametrize(
    "change", [{"temperature": 1.0}, {"max_tokens": 5}, {"model": "n"}, {"thinking": True}]
)
def test_other_parameters_are_other_entries(endpoint, open_client, tmp_path, change):
    ask(open_client(cache_dir=tmp_path))
    assert not ask(open_client(cache_dir=tmp_path, **change)).cached


def test_corrupt_entry_is_ignored_and_rewritten(endpoint, open_client, tmp_path):
    ask(open_client(cache_dir=tmp_path))
    [entry] = tmp_path.rglob("*.json")
    whole = entry.read_bytes()
    for damaged in (b"", whole[:20], b"\xff\xfe", b"[]", b'{"text": 3}'):
        entry.write_bytes(damaged)
        assert not ask(open_client(cache_dir=tmp_path)).cached
        assert entry.read_bytes() == whole


def test_key_is_never_shown(endpoint, open_client, steps, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)

    def echo(status):
        def step(handler):
            return status, f"you sent Authorization: {handler.headers['Authorization']}"

        return step

    def echo_in_reply(handler):
        return 200, steps.completion(f"your key is {KEY}")

    def refuse(text):
        raise ValueError(f"bad: {text}")

    seen = []
    for script, options in (
        ([echo(400)], {}),
        ([echo(500)] * 2, {}),
        ([echo_in_reply] * 2, {"check": refuse}),
        ([steps.reset] * 2, {}),
    ):
        endpoint.requests.clear()
        endpoint.script = script
        error = failure(open_client(KEY, cache_dir=tmp_path, max_attempts=2), **options)
        seen.append("".join(traceback.format_exception(error)))
        assert error.__context__ is None and error.__cause__ is None
    assert "[key]" in seen[0]
    endpoint.requests.clear()
    endpoint.script = [echo_in_reply]
    seen.append(ask(open_client(KEY, cache_dir=tmp_path)).text)
    seen += [path.read_text() for path in tmp_path.rglob("*.json")]
    assert len(seen) == 6
    seen += [record.getMessage() for record in caplog.records]
    assert KEY not in "\n".join(seen)
    assert all(KEY in headers.get("Authorization", "") for _, _, headers, _ in endpoint.requests)


def test_cancelled_request_frees_its_slot(endpoint, open_client, steps):
    endpoint.script = [steps.hang]

    async def run():
        async with open_client(max_concurrent=1) as client:
            task = asyncio.create_task(client.complete(MESSAGES))
            while not endpoint.requests:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await client.complete(MESSAGES), client.stats()

    reply, stats = asyncio.run(run())
    assert reply.text == "good"
    assert set(stats["failures"].values()) == {0}


@pytest.mark.parametrize("status", [400, 422])
def test_unknown_thinking_field_is_dropped_once(endpoint, open_client, status):
    endpoint.script = [(status, "Unrecognized request argument: chat_template_kwargs")]
    client = open_client()
    assert ask(client).attempts == 1
    ask(client)
    sent = ["chat_template_kwargs" in body for _, _, _, body in endpoint.requests]
    assert sent == [True, False, False]
    assert set(client.stats()["failed_attempts"].values()) == {0}


def test_refusal_after_the_field_was_dropped_is_final(endpoint, open_client):
    endpoint.script = [(400, "bad chat_template_kwargs")] * 2
    assert failure(open_client()).status == 400
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize(
    "options, sent",
    [
        ({"thinking": True}, {}),
        ({"thinking_off": "none"}, {}),
        ({"thinking_off": "thinking"}, {"thinking": {"type": "disabled"}}),
    ],
)
def test_thinking_field(endpoint, open_client, options, sent):
    ask(open_client(**options))
    body = endpoint.requests[0][3]
    assert {name: body[name] for name in body if "thinking" in name or "kwargs" in name} == sent


def test_a_nucleus_is_sent_only_where_one_is_asked_for(endpoint, open_client):
    ask(open_client())
    ask(open_client(top_p=0.9))
    assert [body.get("top_p") for _, _, _, body in endpoint.requests] == [None, 0.9]


def test_the_newer_name_of_the_limit_is_taken_from_the_refusal(endpoint, open_client):
    endpoint.script = [(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens'.")]
    client = open_client(max_tokens=7)
    ask(client)
    ask(client)
    assert [(body.get("max_tokens"), body.get("max_completion_tokens"))
            for _, _, _, body in endpoint.requests] == [(7, None), (None, 7), (None, 7)]


def test_only_a_nucleus_of_everything_may_be_left_out(endpoint, open_client, steps):
    refusal = (400, "temperature and top_p cannot both be given")
    endpoint.script = [refusal, (200, steps.completion()), refusal]
    assert ask(open_client(top_p=1)).text == "good"
    assert ["top_p" in body for _, _, _, body in endpoint.requests] == [True, False]
    assert failure(open_client(top_p=0.9)).status == 400


def test_an_empty_reply_may_be_one(endpoint, open_client, steps, tmp_path):
    endpoint.script = [(200, steps.completion("", "length"))]
    for cached in (False, True):
        client = open_client(cache_dir=tmp_path)
        reply = asyncio.run(client.complete(MESSAGES, allow_empty=True))
        assert (reply.text, reply.finish_reason, reply.cached) == ("", "length", cached)


def probe(client):
    async def run():
        async with client:
            return await client.probe()

    return asyncio.run(run())


def test_probe_lists_models(endpoint, open_client, caplog):
    endpoint.script = [(200, {"data": [{"id": "m"}, {"id": "n"}]})] * 2
    assert probe(open_client()) == ("m", "n")
    assert endpoint.requests[0][:2] == ("GET", "/v1/models")
    assert caplog.records == []
    probe(open_client(model="typo"))
    assert "does not list the model 'typo'; it lists m, n" in caplog.text


@pytest.mark.parametrize("status", [401, 403])
def test_probe_names_the_variable_of_a_refused_key(endpoint, open_client, status):
    endpoint.script = [(status, "who are you?")]
    with pytest.raises(ChatError, match="MEMCALIB_JUDGE_API_KEY"):
        probe(open_client(KEY))


@pytest.mark.parametrize("step", [(404, "no list"), (200, "hello"), (200, {"data": None})])
def test_probe_accepts_an_endpoint_without_a_list(endpoint, open_client, step):
    endpoint.script = [step]
    assert probe(open_client()) == ()


def test_probe_refuses_a_broken_server(endpoint, open_client):
    endpoint.script = [(502, "bad gateway")]
    with pytest.raises(ChatError, match="HTTP 502: bad gateway.*check the address"):
        probe(open_client())


def asks_until_stopped(client, endpoint, *, count, out):
    """Stops a client of `count` calls when `out` have reached the endpoint; returns all ends."""
    async def run():
        async with client:
            calls = [asyncio.create_task(client.complete(MESSAGES, sample_index=index))
                     for index in range(count)]
            while len(endpoint.requests) < out:
                await asyncio.sleep(0.005)
            client.stop()
            await asyncio.sleep(0.05)
            left = sum(not call.done() for call in calls)
            endpoint.released.set()
            return left, await asyncio.wait_for(
                asyncio.gather(*calls, return_exceptions=True), 10)

    return asyncio.run(run())


def answer_when_released(handler):
    handler.server.released.wait(20)
    return 200, {"choices": [{"message": {"content": "late"}, "finish_reason": "stop"}]}


@pytest.mark.parametrize("bound", [{"requests_per_minute": 3}, {"max_concurrent": 3},
                                   {"tokens_per_minute": 3 * 16500}])
def test_a_stopped_client_waits_only_for_what_is_out(endpoint, tmp_path, bound):
    endpoint.script = [answer_when_released] * 3
    client = ChatClient(ChatSettings(endpoint.base_url, "m", cache_dir=tmp_path, **bound),
                        api_key="")
    left, ends = asks_until_stopped(client, endpoint, count=9, out=3)
    assert left == 3
    assert sorted(type(end).__name__ for end in ends) == ["Reply"] * 3 + ["Stopped"] * 6
    assert len(endpoint.requests) == 3
    with pytest.raises(Stopped):
        asyncio.run(client.complete(MESSAGES))


def test_a_stopped_client_retries_nothing(endpoint):
    endpoint.script = [(429, "later", {"Retry-After": "200"})] * 3
    client = ChatClient(ChatSettings(endpoint.base_url, "m"), api_key="")
    left, ends = asks_until_stopped(client, endpoint, count=1, out=1)
    assert (left, [type(end) for end in ends]) == (0, [Stopped])
    assert len(endpoint.requests) == 1


def test_a_stopped_client_waits_for_no_other_asker(endpoint, tmp_path):
    endpoint.script = [answer_when_released]
    settings = ChatSettings(endpoint.base_url, "m", cache_dir=tmp_path)

    async def run():
        async with ChatClient(settings, api_key="") as asker, (
                ChatClient(settings, api_key="")) as other:
            calls = [asyncio.create_task(client.complete(MESSAGES)) for client in (asker, other)]
            while not endpoint.requests:
                await asyncio.sleep(0.005)
            other.stop()
            with pytest.raises(Stopped):
                await asyncio.wait_for(calls[1], 5)
            endpoint.released.set()
            return await calls[0]

    assert asyncio.run(run()).text == "late"
