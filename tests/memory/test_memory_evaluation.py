"""Evaluation of banks: scores by hand, groups, baselines, tails, and the judge's verdicts."""

import json

import numpy as np
import pytest
from scripted import Scripted, insert_every_fact, note_every_turn

from memcalib_jax.api import BackgroundLoop, ChatClient, ChatSettings
from memcalib_jax.api.server import ChatServer, last_user_object, serving
from memcalib_jax.memory.agents import Chat
from memcalib_jax.memory.bank import Bank, Insert
from memcalib_jax.memory.conversations import Question, load_conversations
from memcalib_jax.memory.episodes import EpisodeConfig, SessionRun, Start, Trajectory, \
    run_trajectories
from memcalib_jax.memory.evaluation import (
    Everything, Scored, bank_growth, completion_tokens, raw_bank, score_answers, stage_of,
    summarize)
from memcalib_jax.memory.judge import judge_answers, read_label
from memcalib_jax.memory.retrieval import Retriever, SearchConfig, WordEncoder
from memcalib_jax.memory.rewards import EvidenceCounts
from memcalib_jax.memory.roles import load_prompts
from memcalib_jax.memory.sample import gold_bank, sample_conversations

PROMPTS = load_prompts()


@pytest.fixture
def conversation(row, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps([row]))
    return load_conversations(tmp_path / "c.json")[0]


def question(category=4, evidence=("D2:1",), latest=None):
    return Question(0, "?", "a boat", category, evidence, latest)


def scored(f1, *, failed=False, right=None, evidence=EvidenceCounts(), **of_question):
    return Scored("c", question(**of_question), "", True, failed, f1, f1 / 2, evidence, right)


def test_a_hand_made_bank_scores_as_worked_by_hand(conversation):
    # Of four questions, two are scored: one is adversarial, one has no evidence.
    bank = Bank(conversation.speakers)
    bank, _ = bank.apply([Insert("Ben", "Ben bought a boat", "D2:2")], session=2, time="noon")
    agent = Scripted(lambda ask: "<answer>a red boat</answer>" if "buy" in ask.text else "2024")
    rows = score_answers([conversation], [bank], agent, Retriever(
        WordEncoder(), SearchConfig(threshold=0.0)), PROMPTS)
    # "a" goes: red boat against boat: precision 1/2, recall 1, no brevity penalty.
    assert [(row.answer, row.f1, row.bleu_1) for row in rows] == [
        ("a red boat", pytest.approx(2 / 3), 0.5), ("", 0.0, 0.0)]
    # D2:2 is there for both, D10:1 is not.
    assert [(row.evidence.required, row.evidence.missing) for row in rows] == [(1, 0), (2, 1)]
    values = summarize(rows)
    assert values["all"] == {"questions": 2, "failed": 0, "f1": pytest.approx(100 / 3),
                             "bleu_1": 25.0, "judge": None, "m_fail": pytest.approx(100 / 3),
                             "retrieval_failure": 0.0}
    assert {name: group["questions"] for name, group in values["category"].items()} == {
        "single_hop": 1, "temporal": 1}
    assert {name: group["f1"] for name, group in values["session"].items()} == {
        "2": pytest.approx(200 / 3), "10": 0.0}
    assert list(values["stage"]) == ["1-8", "1-16"]
    json.dumps([row.to_json() for row in rows] + [values])


def test_what_failed_is_counted_and_left_out_of_the_means():
    rows = [scored(1.0, right=True), scored(0.5, right=False), scored(0.0, failed=True),
            scored(0.0, right=None)]
    assert summarize(rows)["all"] == {
        "questions": 4, "failed": 1, "f1": 50.0, "bleu_1": 25.0, "judge": 50.0, "m_fail": None,
        "retrieval_failure": None}


@pytest.mark.parametrize("evidence, latest, stage", [
    (("D8:1",), None, "1-8"), (("D1:1", "D9:1"), None, "1-16"), (("D32:1",), None, "1-32"),
    (("D33:1",), None, "over 32"), ((), 5, "1-8")])
def test_stages(evidence, latest, stage):
    assert stage_of(question(evidence=evidence, latest=latest)) == stage


def test_baselines_hold_every_turn(conversation):
    bank = raw_bank(conversation)
    turns = [turn for session in conversation.sessions for turn in session.turns]
    assert [entry.dia_ids for entry in bank.entries.values()] == [(t.dia_id,) for t in turns]
    agent = Scripted(lambda ask: "<answer>x</answer>")
    rows = score_answers([conversation], [bank], agent, Everything(), PROMPTS)
    assert summarize(rows)["all"]["m_fail"] == 0.0
    text = agent.asks[0][0].text
    assert text.index("Ben: I bought a boat. [Sent an image") < text.index("Ben: I sold the boat.")


def test_gold_banks_lack_nothing():
    conversations = sample_conversations()
    rows = score_answers(conversations, [gold_bank(c) for c in conversations],
                         Scripted(lambda ask: "<answer>?</answer>"), Retriever(WordEncoder()),
                         PROMPTS)
    assert len(rows) == 4 * 18
    assert summarize(rows)["all"]["m_fail"] == 0.0


def test_growth_by_session(conversation):
    agents = {"extract": Scripted(note_every_turn), "manage": Scripted(insert_every_fact)}
    (trajectory,), = run_trajectories([conversation], agents, Retriever(WordEncoder()), PROMPTS,
                                      EpisodeConfig(num_chunks=1, num_trajectories=1))
    growth = bank_growth([trajectory])
    assert {number: values["entries"] for number, values in growth.items()} == {"2": 3, "10": 4}
    assert growth["10"]["words"] - growth["2"]["words"] == 4
    assert completion_tokens([trajectory]) is None


def test_tails_of_replies(conversation):
    def run(*lengths):
        chat = Chat((), (), tuple((10, 10 + length) for length in lengths))
        start = Start(conversation, conversation.sessions[0], 0, Bank(conversation.speakers))
        return SessionRun(start, start.bank, {"extract": chat}, True, {})

    values = completion_tokens([Trajectory(conversation, (run(1, 2), run(3))),
                                Trajectory(conversation, (run(100),))])
    assert values == {"per_conversation": 53.0, "per_reply": 26.5, "p50": 2.5,
                      "p90": pytest.approx(np.percentile([1, 2, 3, 100], 90)),
                      "p99": pytest.approx(np.percentile([1, 2, 3, 100], 99)), "longest": 100.0}


def test_verdicts_and_those_that_cannot_be_had():
    def answer(body):
        asked = last_user_object(body["messages"])
        return {"boat": 'So: {"label": "correct"}', "car": '{"label": "WRONG"}'}.get(
            asked["answer"], "I cannot say")

    with serving(ChatServer(0, {"judge": "test"}, answer)) as server, BackgroundLoop() as loop:
        client = ChatClient(ChatSettings(server.base_url, "judge", max_attempts=1), api_key="")
        verdicts = judge_answers([(question(), "boat"), (question(), "car"), (question(), "?")],
                                 client, loop, PROMPTS["judge"])
        loop.submit(client.aclose()).result()
    assert verdicts == [True, False, None]


@pytest.mark.parametrize("reply", ["", "[]", '{"label": 1}', '{"label": "MAYBE"}', "CORRECT"])
def test_a_reply_without_a_verdict(reply):
    with pytest.raises(ValueError):
        read_label(reply)
