"""Conversations as they are read, refused and cut."""

import json
import os

import pytest

from memcalib_jax.memory.conversations import (
    LOCOMO_SPLITS, ConversationError, Session, Turn, load_conversations, parse_evidence)
from memcalib_jax.memory.sample import SPLITS, gold_bank, sample_conversations


@pytest.fixture
def load(tmp_path):
    def of(*rows):
        path = tmp_path / "conversations.json"
        path.write_text(json.dumps(rows))
        return load_conversations(path)
    return of


def test_sessions_come_by_number_and_empty_ones_are_none(load, row):
    conversation, = load(row)
    assert [session.number for session in conversation.sessions] == [2, 10]
    assert [session.time for session in conversation.sessions] \
        == ["8:00 am on 1 May, 2024", "9:00 am on 2 May, 2024"]
    assert conversation.speakers == ("Ann", "Ben")
    assert len(conversation.sessions[1].turns) == 1


def test_a_caption_is_shown_and_not_counted(load, row):
    first = load(row)[0].sessions[0]
    assert first.turns[1].shown == "I bought a boat. [Sent an image showing a red boat]"
    assert first.num_words == 2 + 4 + 1
    assert Turn("D1:1", "Ann", "", "a cat").shown == "[Sent an image showing a cat]"


def test_questions(load, row):
    conversation, = load(row)
    bought, sold, why, other = conversation.questions
    assert (sold.answer, sold.evidence, sold.sessions) == ("2024", ("D2:2", "D10:1"), {2, 10})
    assert [q.scored for q in conversation.questions] == [True, True, False, False]
    assert other.answer == ""
    assert conversation.questions_until(9) == [bought]
    assert conversation.questions_until(10) == [bought, sold]
    assert conversation.questions_until(10, only=True) == [sold]
    assert [conversation.words_until(n) for n in (1, 2, 10)] == [0, 7, 11]


def test_first_sessions_leave_out_later_questions(load, row):
    conversation, = load(row)
    short = conversation.first_sessions(8)
    assert [session.number for session in short.sessions] == [2]
    assert [question.index for question in short.questions] == [0, 2, 3]
    assert conversation.first_sessions(32) == conversation
    with pytest.raises(ConversationError, match="c1 has no session up to number 1"):
        conversation.first_sessions(1)


@pytest.mark.parametrize("turns, count, sizes", [
    (10, 6, [2, 2, 2, 2, 2, 0]), (1, 6, [1, 0, 0, 0, 0, 0]), (9, 4, [3, 3, 3, 0]), (8, 4, [2] * 4)])
def test_chunks(turns, count, sizes):
    session = Session(1, "", tuple(Turn(f"D1:{n}", "Ann", "") for n in range(turns)))
    chunks = session.chunks(count)
    assert [len(chunk) for chunk in chunks] == sizes
    assert sum(chunks, ()) == session.turns


@pytest.mark.parametrize("texts, ids", [
    (["D8:6; D9:17"], ("D8:6", "D9:17")), (["D9:1 D4:4 D4:6"], ("D9:1", "D4:4", "D4:6")),
    (["D1:18", "D", "D1:20"], ("D1:18", "D1:20")), (["D:11:26"], ()), (["D30:05"], ("D30:5",)),
    (["D1:1", "D1:1", 7, None], ("D1:1",))])
def test_evidence(texts, ids):
    assert parse_evidence(texts) == ids


def change(path, value):
    def apply(row):
        *parents, last = path
        for key in parents:
            row = row[key]
        if value is KeyError:
            del row[last]
        else:
            row[last] = value
    return apply


@pytest.mark.parametrize("damage, message", [
    (change(["conversation"], {"speaker_a": "Ann", "speaker_b": "Ben"}), "no session with a turn"),
    (change(["conversation", "session_2", 0, "speaker"], "Cid"),
     "turn D2:1 is by 'Cid', who is neither 'Ann' nor 'Ben'"),
    (change(["conversation", "session_2", 0, "dia_id"], "D3:1"), "must be D2:<turn>, not 'D3:1'"),
    (change(["conversation", "session_2", 0, "dia_id"], "D2:2"), "session_2 has a dia_id twice"),
    (change(["conversation", "session_2", 0, "text"], None), "session_2: text must be there"),
    (change(["conversation", "session_2_date_time"], KeyError), "session_2_date_time must be"),
    (change(["conversation", "speaker_b"], "Ann"), "must be two different names"),
    (change(["qa", 0, "answer"], KeyError), "question 1: answer is missing"),
    (change(["qa", 0, "category"], 6), "question 1: category must be one of 1 to 5, not 6"),
    (change(["qa", 0, "category"], True), "question 1: category must be there"),
    (change(["qa", 0, "evidence"], "D2:2"), "question 1: evidence must be there"),
    (change(["sample_id"], 3), "conversation 1: sample_id must be"),
])
def test_a_damaged_conversation_is_refused_by_name(load, row, damage, message):
    damage(row)
    with pytest.raises(ConversationError, match=message) as caught:
        load(row)
    assert "conversations.json, conversation 1" in str(caught.value)


def test_a_file_that_is_none(load, row, tmp_path):
    with pytest.raises(ConversationError, match="'c1' is repeated"):
        load(row, row)
    with pytest.raises(ConversationError, match="at least one"):
        load()
    with pytest.raises(ConversationError, match="cannot be read"):
        load_conversations(tmp_path / "missing.json")


def test_the_built_in_conversations():
    conversations = {c.id: c for c in sample_conversations()}
    assert sorted(conversations) == sorted(sum(SPLITS.values(), ()))
    assert [len(c.sessions) for c in conversations.values()] == [8] * 4
    assert sum(len(s.turns) for c in conversations.values() for s in c.sessions) == 293
    assert sum(len(c.questions) for c in conversations.values()) == 80
    for conversation in conversations.values():
        bank = gold_bank(conversation)
        for question in conversation.questions_until(8):
            assert set(question.evidence) <= bank.dia_ids
    assert [len(gold_bank(c)) for c in conversations.values()] == [24, 26, 24, 24]


@pytest.mark.skipif("MEMCALIB_LOCOMO" not in os.environ, reason="MEMCALIB_LOCOMO names no file")
def test_locomo_counts():
    conversations = {c.id: c for c in load_conversations(os.environ["MEMCALIB_LOCOMO"])}

    def count(split, sessions):
        return [len(conversations[id].first_sessions(sessions).questions_until(sessions))
                for id in LOCOMO_SPLITS[split]]

    assert [sum(count(split, 99)) for split in LOCOMO_SPLITS] == [328, 123, 1085]
    assert [count("train", n) for n in (8, 16, 32)] == [[44, 35], [97, 66], [178, 150]]
    assert [len(conversations[id].sessions) for id in LOCOMO_SPLITS["train"]] == [29, 31]
