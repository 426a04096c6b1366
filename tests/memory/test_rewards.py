"""Scores of answers and banks against hand-worked values."""

import math
import os
import pathlib
import subprocess
import sys

import pytest

from memcalib_jax.memory.bank import Bank, Insert
from memcalib_jax.memory.conversations import Question, load_conversations
from memcalib_jax.memory.rewards import (
    EvidenceCounts, RewardConfig, answer_tokens, bank_reward, bleu_1, choose_questions,
    evidence_counts, excess_ratio, session_rewards, token_f1)


def question(index, *evidence, category=4):
    return Question(index, f"question {index}", "yes", category, evidence)


def test_tokens():
    assert answer_tokens("The  cat's  (an) A-frame, theatre!") == ["cats", "aframe", "theatre"]


@pytest.mark.parametrize("answer, gold, multiset, as_set", [
    ("a red boat", "the red boat", 1.0, 1.0),
    ("red boat", "boat", 2 / 3, 2 / 3),               # p 1/2, r 1
    ("no", "yes", 0.0, 0.0),
    ("red red boat", "red red car", 4 / 6, 2 / 6),     # two reds shared, or one
    ("red red", "red", 2 / 3, 2 / 3),
    ("", "yes", 0.0, 0.0), ("the", "a", 1.0, 1.0), ("yes", "", 0.0, 0.0),
])
def test_f1(answer, gold, multiset, as_set):
    assert token_f1(answer, gold) == pytest.approx(multiset)
    assert token_f1(answer, gold, overlap="set") == pytest.approx(as_set)
    assert token_f1(gold, answer) == token_f1(answer, gold)


@pytest.mark.parametrize("answer, gold, score", [
    ("red boat", "red boat", 1.0),
    ("red boat sails", "red boat", 2 / 3),
    ("red red red", "red boat", 1 / 3),                # clipped to the one red of the gold
    ("red", "red boat sails", math.exp(1 - 3)),        # brevity
    ("red car", "big red boat sails", 0.5 * math.exp(1 - 2)),
    ("", "x", 0.0), ("", "", 1.0),
])
def test_bleu(answer, gold, score):
    assert bleu_1(answer, gold) == pytest.approx(score)


@pytest.mark.parametrize("memory, conversation, ratio", [
    (70, 100, 0.0), (0, 100, 0.0), (80, 100, 0.1), (150, 100, 0.8), (5, 0, 0.0)])
def test_excess(memory, conversation, ratio):
    assert excess_ratio(memory, conversation) == pytest.approx(ratio)


def test_bank_reward():
    assert bank_reward([1.0, 0.5], 0.5) == pytest.approx(0.75 - 0.15)
    assert bank_reward([], 0.5) == pytest.approx(-0.15)
    assert bank_reward([0.5], 0.5, RewardConfig(compression=0.2)) == pytest.approx(0.4)


def test_sessions_are_paid_for_the_evidence_they_hold():
    f1s = {question(0, "D1:1"): 1.0, question(1, "D1:2", "D3:1"): 0.5, question(2): 0.2}
    rewards = session_rewards(f1s, [1, 2, 3, 5], 0.5)
    assert rewards == pytest.approx({1: 0.75 - 0.15, 2: -0.15, 3: 0.5 - 0.15, 5: 0.2 - 0.15})


@pytest.mark.parametrize("unfinished, first", [("both", 0.0), ("local", 1.0)])
def test_an_unfinished_session(unfinished, first):
    f1s = {question(0, "D1:1"): 1.0, question(1, "D2:1"): 0.5}
    rewards = session_rewards(f1s, [1, 2], 0.0, RewardConfig(unfinished=unfinished),
                              unfinished={1})
    assert rewards == {1: first, 2: 0.5}


def test_a_group_answers_the_same_questions():
    questions = [question(n, "D1:1") for n in range(50)]
    chosen = choose_questions(questions, 16, 7, "conv-1", 3)
    assert len(chosen) == len(set(chosen)) == 16
    assert [q.index for q in chosen] == sorted(q.index for q in chosen)
    assert chosen == choose_questions(questions, 16, 7, "conv-1", 3)
    assert chosen != choose_questions(questions, 16, 7, "conv-1", 4)
    assert choose_questions(questions, 50, 0) == questions


def test_another_process_draws_the_same():
    code = ("from memcalib_jax.memory.rewards import choose_questions as c\n"
            "print(c(list(range(50)), 5, 7, 'conv-1', 3))")
    outputs = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              check=True, cwd=pathlib.Path(__file__).parents[2],
                              env={**os.environ, "PYTHONHASHSEED": seed}).stdout
               for seed in ("1", "2")}
    assert outputs == {f"{choose_questions(list(range(50)), 5, 7, 'conv-1', 3)}\n"}


def test_evidence():
    counts = evidence_counts(question(0, "D1:1", "D1:2", "D2:3"), {"D1:1", "D1:2"}, ["D1:2", "D9:9"])
    assert counts == EvidenceCounts(required=3, missing=1, unretrieved=1)
    both = counts + evidence_counts(question(1, "D1:1"), {"D1:1"}, ["D1:1"])
    assert both == EvidenceCounts(4, 1, 1)
    assert (both.memory_failure, both.retrieval_failure) == (0.25, 0.25)
    assert EvidenceCounts().memory_failure == 0


@pytest.mark.parametrize("settings, message", [
    ({"overlap": "bag"}, "overlap must be one of multiset, set"),
    ({"unfinished": "none"}, "unfinished must be one of both, local"),
    ({"compression": -1.0}, "compression must be"), ({"allowance": float("nan")}, "allowance must"),
    ({"local_questions": 0}, "local_questions must be at least 1"),
])
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**settings)


@pytest.mark.skipif("MEMCALIB_LOCOMO" not in os.environ, reason="MEMCALIB_LOCOMO names no file")
def test_memory_failure_of_hand_made_locomo_banks():
    conversation, = (c for c in load_conversations(os.environ["MEMCALIB_LOCOMO"])
                     if c.id == "conv-26")
    asked = conversation.questions_until(1)
    evidence = [dia_id for q in asked for dia_id in set(q.evidence)]

    def failure(turns):
        bank, _ = Bank(conversation.speakers).apply(
            [Insert("Caroline", turn, turn) for turn in turns], session=1, time="")
        return sum((evidence_counts(q, bank.dia_ids, bank.dia_ids) for q in asked),
                   EvidenceCounts()).memory_failure

    assert failure([]) == 1 and failure(evidence) == 0
    # Without one turn, as many pieces are missing as questions need it.
    assert failure(set(evidence) - {"D1:3"}) == pytest.approx(
        evidence.count("D1:3") / len(evidence))
    assert evidence.count("D1:3") >= 1
