"""Traces for the answer agent: what it reads, which are kept, and the split."""

import dataclasses
import json

import pytest
from scripted import Scripted

from memcalib_jax.memory.evaluation import score_answers
from memcalib_jax.memory.retrieval import Retriever, SearchConfig, WordEncoder
from memcalib_jax.memory.roles import load_prompts
from memcalib_jax.memory.sample import gold_bank, sample_conversations
from memcalib_jax.memory.traces import (
    Trace, keep_traces, make_traces, split_traces, trace_from_json)

TRACES = [Trace("c", n, f"question {n}", "gold", n / 10) for n in range(10)]


def test_a_trace_is_what_an_answer_agent_reads():
    conversations = sample_conversations()[:2]
    banks = [gold_bank(conversation) for conversation in conversations]
    retriever = Retriever(WordEncoder(), SearchConfig(threshold=0.1))
    agent = Scripted(lambda ask: ("", "failed") if "allergic" in ask.text.rsplit("Question:")[-1]
                     else "<answer>Runner's knee</answer>")
    rows = score_answers(conversations, banks, agent, retriever, load_prompts())
    traces = make_traces(conversations, banks, retriever, rows)
    assert len(traces) == 36
    assert [trace.text for trace in traces] == [ask.text for ask in agent.asks[0]]
    assert traces[0].f1 is None and traces[1].f1 == 1.0
    assert traces[1].text.endswith("Question: Which injury made Bram give up the half marathon?")
    assert traces[1] in keep_traces(traces) and traces[0] not in keep_traces(traces)
    assert all(trace.f1 is None for trace in make_traces(conversations, banks, retriever))


def test_kept_from_a_quarter_on():
    assert [trace.question for trace in keep_traces(TRACES)] == list(range(3, 10))
    assert [trace.question for trace in keep_traces(TRACES, 0.9)] == [9]


def test_the_split_is_a_partition_by_seed():
    train, held = split_traces(TRACES * 2, 3)
    assert (len(train), len(held)) == (18, 2)
    assert sorted(t.question for t in train + held) == sorted([*range(10)] * 2)
    assert split_traces(TRACES, 3) == split_traces(TRACES, 3) != split_traces(TRACES, 5)
    assert [len(part) for part in split_traces(TRACES[:2], 0)] == [1, 1]
    with pytest.raises(ValueError, match="1 traces cannot be split"):
        split_traces(TRACES[:1], 0)


def test_json_round_trip():
    for trace in (TRACES[3], dataclasses.replace(TRACES[3], f1=None)):
        assert trace_from_json(json.loads(json.dumps(dataclasses.asdict(trace)))) == trace
    with pytest.raises(ValueError, match="gold is missing"):
        trace_from_json({"conversation": "c", "question": 1, "text": "t", "f1": None})
    with pytest.raises(ValueError, match="question is missing or of another type"):
        trace_from_json(dataclasses.asdict(TRACES[3]) | {"question": True})
