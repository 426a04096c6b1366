import asyncio
import socket

import pytest

from memcalib_jax.api import ChatClient, ChatError, ChatSettings
from memcalib_jax.judge import Judge
from memcalib_jax.judge.server import MODEL_NAME, serve

RESPONSE = "With your peanut allergy, take apples. Enjoy them."


def run(coroutine):
    return asyncio.run(coroutine)


async def judge_all(url, record, responses, **settings):
    async with ChatClient(ChatSettings(url, MODEL_NAME, **settings), api_key="") as client:
        judge = Judge(client)
        judged = await asyncio.gather(*(judge.judge(record, text) for text in responses))
        return judged, client.stats()


def test_judges_over_http(record, tmp_path):
    with serve() as server:
        [judgment], stats = run(
            judge_all(server.base_url, record, [RESPONSE], cache_dir=tmp_path)
        )
        [again], stats_again = run(
            judge_all(server.base_url, record, [RESPONSE], cache_dir=tmp_path)
        )
    assert judgment.levels == (2, 0, 0) and judgment.valid
    assert judgment.details[0].evidence_quote == "With your peanut allergy, take apples."
    assert judgment.details[1].evidence_quote == ""
    assert again == judgment
    assert (stats["attempts"], stats_again["attempts"]) == (1, 0)


@pytest.mark.parametrize("response", ["", " \n\t"])
def test_empty_response_is_invalid_without_a_call(record, response):
    with serve() as server:
        [judgment], stats = run(judge_all(server.base_url, record, [response]))
    assert (judgment.valid, judgment.levels) == (False, None)
    assert judgment.reason == "empty_response"
    assert stats["requests"] == 0


def test_unreachable_judge_makes_every_response_invalid(record):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        judged, stats = run(judge_all(url, record, ["one", "two"], max_attempts=1))
    assert [(judgment.valid, judgment.levels) for judgment in judged] == [(False, None)] * 2
    assert all(judgment.reason.startswith("network: ") for judgment in judged)
    assert stats["failures"]["network"] == 2


def test_refused_model_is_a_reason(record):
    async def ask(url):
        async with ChatClient(ChatSettings(url, "gpt"), api_key="") as client:
            return await Judge(client).judge(record, "text")

    with serve() as server:
        judgment = run(ask(server.base_url))
    assert not judgment.valid
    assert judgment.reason.startswith("http_4xx: HTTP 404") and MODEL_NAME in judgment.reason


def test_long_reasons_are_cut(record):
    class Broken:
        async def complete(self, messages, *, sample_index, check):
            raise ChatError("parse", "x" * 9000)

    judgment = run(Judge(Broken()).judge(record, "text"))
    assert judgment.reason == "parse: " + "x" * 493


def test_bad_reply_reaches_the_check_and_sample_index_the_client(record):
    class Client:
        async def complete(self, messages, *, sample_index, check):
            assert sample_index == 3
            try:
                check('{"atom_judgments": []}')
            except ValueError as error:
                raise ChatError("parse", str(error)) from None

    judgment = run(Judge(Client()).judge(record, "text", sample_index=3))
    assert judgment.reason == "parse: no judgment of 'a1', 'a2', 'a3'"


def test_a_mistake_in_the_program_is_no_endpoint_fault(record):
    class Wrong:
        async def complete(self, messages, *, sample_index, check):
            raise TypeError("wrong call")

    with pytest.raises(TypeError, match="wrong call"):
        run(Judge(Wrong()).judge(record, "text"))


def test_a_blind_judge_over_http(record):
    async def judge():
        async with ChatClient(ChatSettings(server.base_url, MODEL_NAME), api_key="") as client:
            return await Judge(client, "Judge.", blind=True).judge(record, RESPONSE)

    with serve() as server:
        assert run(judge()).levels == (2, 0, 0)
