"""The stand-in plays every role by what it is asked."""

import json

import pytest

from memcalib_jax.memory.judge import read_label
from memcalib_jax.memory.bank import Entry, Insert
from memcalib_jax.memory.conversations import Session, Turn
from memcalib_jax.memory.roles import (
    Fact, answer_text, extractor_text, manager_text, merged_text, parse_answer, parse_facts,
    parse_operations)
from memcalib_jax.memory.stand_in import stand_in_reply

SPEAKERS = ("Ann", "Ben")
TURNS = (Turn("D1:1", "Ann", "I bought tea: green."), Turn("D1:2", "Ben", "I row {daily}."))
SESSION = Session(1, "noon", TURNS)
ENTRIES = [Entry("0a", "Ann", "Ann drinks green tea.", 1, "noon", ("D1:1",)),
           Entry("0b", "Ann", "Ann has a cat.", 1, "noon", ("D1:2",))]
KEPT = (Insert("Ann", "I bought tea: green.", "D1:1"), Insert("Ben", "I row {daily}.", "D1:2"))


def reply(text):
    return stand_in_reply([{"role": "system", "content": "x"}, {"role": "user", "content": text}])


@pytest.mark.parametrize("chunk", [0, 1])
def test_builders(chunk):
    facts = parse_facts(reply(extractor_text(SESSION, TURNS, chunk)), SPEAKERS)
    assert facts.items == (Fact("Ann", "D1:1", "I bought tea: green."),
                           Fact("Ben", "D1:2", "I row {daily}."))
    assert parse_facts(reply(extractor_text(SESSION, (), chunk)), SPEAKERS).items == ()
    managed = reply(manager_text(ENTRIES, facts.items, [["0a"], []], chunk))
    assert parse_operations(managed, SPEAKERS).items == KEPT
    assert parse_operations(reply(manager_text([], [], [], chunk)), SPEAKERS).items == ()


def test_merged_role():
    turns = TURNS[:1]
    assert parse_operations(reply(merged_text(SESSION, turns, ENTRIES, 0)),
                            SPEAKERS).items == KEPT[:1]


def test_answers():
    text = answer_text("Which tea does Ann drink?", {"Ann": ENTRIES, "Ben": []})
    assert parse_answer(reply(text)) == ("Ann drinks green tea.", True)
    assert parse_answer(reply(answer_text("Which?", {"Ann": []}))) == ("", True)


@pytest.mark.parametrize("answer, right", [("She has a boat.", True), ("A bike", False), ("", False)])
def test_verdicts(answer, right):
    asked = {"question": "?", "reference": "a boat", "answer": answer}
    assert read_label(reply(json.dumps(asked))) is right


@pytest.mark.parametrize("text", ["Hello", "{", '{"a": 1}'])
def test_other_messages_are_refused(text):
    with pytest.raises(ValueError, match="no memory role"):
        reply(text)
