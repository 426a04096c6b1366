"""Rewards and groups of scripted episodes, by hand; and a game in which the culprit is known."""

import dataclasses
import random

import numpy as np
import pytest
from scripted import Scripted

from memcalib_jax.memory.agents import Chat
from memcalib_jax.memory.bank import Bank, Insert
from memcalib_jax.memory.conversations import Conversation, Question, Session, Turn
from memcalib_jax.memory.credit import Row, reward_rows, row_advantages
from memcalib_jax.memory.episodes import SessionRun, Start, Trajectory
from memcalib_jax.memory.retrieval import Retriever, SearchConfig, WordEncoder
from memcalib_jax.memory.rewards import RewardConfig
from memcalib_jax.memory.roles import load_prompts

PROMPTS = load_prompts()
CHAT = Chat((), tuple(range(5)), ((1, 5),))


def conversation_of(num_sessions, words_a_turn=40):
    """Session n has one turn, whose fact is `fact<n>`, and one question about it."""
    sessions = tuple(Session(n, "noon", (Turn(f"D{n}:1", "Ann", "word " * words_a_turn),))
                     for n in range(1, num_sessions + 1))
    questions = tuple(Question(n - 1, f"what of fact{n}", f"fact{n}", 4, (f"D{n}:1",))
                      for n in range(1, num_sessions + 1))
    return Conversation("c1", ("Ann", "Ben"), sessions, questions)


def answerer():
    """Knows a fact exactly where the memories show it."""
    def say(ask):
        fact = ask.text.split()[-1]
        known = f"] {fact}" in ask.text
        return f"<answer>{fact if known else 'unknown'}</answer>"
    return Scripted(say)


def run_of(conversation, session, bank, keeps, *, trajectory=0, anchor=None, finished=True):
    start = Start(conversation, conversation.sessions[session - 1], trajectory, bank, anchor)
    operations = [Insert("Ann", f"fact{session}", f"D{session}:1")] if keeps else []
    after, _ = bank.apply(operations, session=session, time="noon")
    return SessionRun(start, after, {"extract": CHAT, "manage": CHAT}, finished, start_counts())


def start_counts():
    from collections import Counter
    return Counter({"end/stop": 2, "unread/no JSON object": 1})


def trajectory_of(conversation, kept, trajectory, unfinished=()):
    bank, runs = Bank(conversation.speakers), []
    for session, keeps in enumerate(kept, start=1):
        runs.append(run_of(conversation, session, bank, keeps, trajectory=trajectory,
                           finished=session not in unfinished))
        bank = runs[-1].bank
    return Trajectory(conversation, tuple(runs))


def retriever():
    return Retriever(WordEncoder(), SearchConfig(threshold=0.1))


def test_rewards_and_groups_by_hand():
    conversation = conversation_of(2)
    episodes = [[trajectory_of(conversation, (True, True), 0),
                 trajectory_of(conversation, (True, False), 1, unfinished={1})]]
    anchor = episodes[0][1].runs[1].start
    rerolled = [run_of(conversation, 2, anchor.bank, keeps, trajectory=member, anchor=1)
                for member, keeps in enumerate((True, False))]
    rows, metrics = reward_rows(episodes, rerolled, answerer(), retriever(), PROMPTS,
                                RewardConfig(), 0)
    assert [row.reward for row in rows[::2]] == [1, 1, 0, 0, 1, 0.5]
    assert [row.reward for row in rows[1::2]] == [1, 1, 0, 0, 1, 0.5]
    assert [row.group for row in rows[:4:3]] == [
        ("c1", 1, "extract", None), ("c1", 2, "manage", None)]
    assert [row.group for row in rows[-2:]] == [
        ("c1", 2, "extract", 1), ("c1", 2, "manage", 1)]
    assert all(row.valid for row in rows)
    root = 2**-0.5
    np.testing.assert_allclose(row_advantages(rows)[::2], [root, root, -root, -root, root, -root],
                               atol=1e-5)
    assert metrics["memory/f1"] == 0.75 and metrics["memory/failure"] == 0.25
    assert metrics["memory/entries"] == 1.5 and metrics["memory/unread"] == 6
    assert metrics["memory/end/stop"] == 12 and metrics["memory/rerolled"] == 2


def test_session_only_questions():
    conversation = conversation_of(2)
    bank = Bank(conversation.speakers)
    rerolled = [run_of(conversation, 2, bank, keeps, trajectory=m, anchor=0)
                for m, keeps in enumerate((True, False))]
    for only, expected in ((False, [0.5, 0]), (True, [1, 0])):
        rows, _ = reward_rows([], rerolled, answerer(), retriever(), PROMPTS, RewardConfig(), 0,
                              session_only=only)
        assert [row.reward for row in rows[::2]] == expected


def test_a_bank_that_is_too_long_pays():
    conversation = conversation_of(1, words_a_turn=1)
    # One word of memory against one of conversation: .3 beyond the allowance of .7.
    rows, _ = reward_rows([[trajectory_of(conversation, (True,), 0)]], [], answerer(), retriever(),
                          PROMPTS, RewardConfig(), 0)
    assert rows[0].reward == pytest.approx(1 - 0.3 * 0.3)


def test_an_answer_that_failed_makes_its_rows_invalid_and_spoils_no_group():
    conversation = conversation_of(1)
    episodes = [[trajectory_of(conversation, (keeps,), t)
                 for t, keeps in enumerate((True, False, True))]]
    good = answerer()
    agent = Scripted(lambda ask: ("", "failed") if "fact1\n" not in ask.text else good.say(ask))
    rows, metrics = reward_rows(episodes, [], agent, retriever(), PROMPTS, RewardConfig(), 0)
    assert [row.valid for row in rows[::2]] == [True, False, True]
    assert np.isnan(rows[2].reward) and metrics["memory/failed"] == 1
    assert metrics["memory/f1"] == 1
    assert not row_advantages(rows).any()


def test_only_trained_roles_and_chats_with_steps_have_rows():
    conversation = conversation_of(1)
    trajectory = trajectory_of(conversation, (True,), 0)
    rows, _ = reward_rows([[trajectory]], [], answerer(), retriever(), PROMPTS, RewardConfig(), 0,
                          roles=("manage",))
    assert [row.group[2] for row in rows] == ["manage"]
    silent = dataclasses.replace(trajectory.runs[0], chats={"extract": Chat(())})
    rows, _ = reward_rows([[Trajectory(conversation, (silent,))]], [], answerer(), retriever(),
                          PROMPTS, RewardConfig(), 0)
    assert rows == [] and row_advantages(rows).shape == (0,)


def test_local_groups_find_the_culprit_more_often():
    """A fact of session 1 is lost where session 3 drops it: whose fault a bad end is.

    Sessions keep their fact with probability 0.7; session 3 destroys what session 1 kept with
    probability 0.5. The terminal reward of session 1 then says little about session 1; a reroll of
    session 1 from its own bank says it exactly.
    """
    conversation, rng = conversation_of(3), random.Random(0)

    def sign_is_right(advantages, kept):
        good, bad = ([a for a, k in zip(advantages, kept) if k == which]
                     for which in (True, False))
        return [a > 0 for a in good] + [a < 0 for a in bad]

    by_method = {"global": [], "local": []}
    for _ in range(60):
        kept = [rng.random() < 0.7 for _ in range(8)]
        survives = [keeps and rng.random() < 0.5 for keeps in kept]
        episodes = [[trajectory_of(conversation, (lives, True, True), t)
                     for t, lives in enumerate(survives)]]
        rerolls = [rng.random() < 0.7 for _ in range(4)]
        rerolled = [run_of(conversation, 1, Bank(conversation.speakers), keeps, trajectory=m,
                           anchor=0) for m, keeps in enumerate(rerolls)]
        rows, _ = reward_rows(episodes, rerolled, answerer(), retriever(), PROMPTS,
                              RewardConfig(), 0, roles=("manage",))
        advantages = row_advantages(rows)
        local = [row.group[3] is not None for row in rows]
        first = [row.group == ("c1", 1, "manage", None) for row in rows]
        by_method["global"] += sign_is_right(advantages[np.array(first)], kept)
        if len(set(rerolls)) == 2:
            by_method["local"] += sign_is_right(advantages[np.array(local)], rerolls)
    rates = {name: np.mean(right) for name, right in by_method.items()}
    assert rates["local"] == 1.0
    assert 0.5 < rates["global"] < 0.75


def test_rows_of_equal_group_names_are_one_group_wherever_they_stand():
    rows = [Row(CHAT, ("a",), 1.0, True), Row(CHAT, ("b",), 5.0, True), Row(CHAT, ("a",), 3.0, True)]
    np.testing.assert_allclose(row_advantages(rows), [-2**-0.5, 0, 2**-0.5], atol=1e-5)
