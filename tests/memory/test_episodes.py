"""Episodes with agents that follow a script: what is asked, kept, ended and rerolled."""

import json

import pytest
from scripted import Scripted, insert_every_fact, note_every_turn

from memcalib_jax.memory.agents import Identity
from memcalib_jax.memory.answer import answer_questions
from memcalib_jax.memory.bank import Bank
from memcalib_jax.memory.conversations import load_conversations
from memcalib_jax.memory.episodes import (
    EpisodeConfig, Start, choose_rerolls, run_sessions, run_trajectories)
from memcalib_jax.memory.retrieval import Retriever, SearchConfig, WordEncoder
from memcalib_jax.memory.roles import LATER_CHUNK, load_prompts
from memcalib_jax.memory.sample import sample_conversations

PROMPTS = load_prompts()
CONFIG = EpisodeConfig(num_chunks=2, num_trajectories=3, local_fraction=1.0, num_rerolls=2)


@pytest.fixture
def conversation(row, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps([row]))
    return load_conversations(tmp_path / "c.json")[0]


@pytest.fixture
def retriever():
    return Retriever(WordEncoder())


def agents(extract=note_every_turn, manage=insert_every_fact, merged=None):
    return {"extract": Scripted(extract), "manage": Scripted(manage), "merged": Scripted(merged)}


def start_of(conversation, place=0, trajectory=0):
    return Start(conversation, conversation.sessions[place], trajectory,
                 Bank(conversation.speakers, seed="x"))


def test_a_session_is_read_in_chunks_by_both_roles(conversation, retriever):
    who = agents()
    run, = run_sessions([start_of(conversation)], who, retriever, PROMPTS, CONFIG)
    assert [entry.content for entry in run.bank.entries.values()] == [
        "Any news?", "I bought a boat. [Sent an image showing a red boat]", "Lovely!"]
    assert [entry.dia_ids for entry in run.bank.entries.values()] == [
        ("D2:1",), ("D2:2",), ("D2:3",)]
    assert run.finished and run.counts == {"end/stop": 4, "bank/inserted": 3}
    for role in ("extract", "manage"):
        (first,), (second,) = who[role].asks
        assert len(first.chat.messages) == 1 and len(second.chat.messages) == 3
        assert second.text.startswith(LATER_CHUNK) and not first.text.startswith(LATER_CHUNK)
        assert (first.identity, second.identity) == tuple(
            Identity("c1", 0, 2, chunk, role) for chunk in range(2))
        assert [m["role"] for m in run.chats[role].messages] == [
            "system", "user", "assistant", "user", "assistant"]


def test_the_manager_reads_what_is_similar(conversation, retriever):
    who = agents(extract=lambda ask: json.dumps({"facts": [
        {"speaker": "Ben", "dia_id": "D2:2", "fact": "Ben has a boat."}]}))
    run, = run_sessions([start_of(conversation)], who, retriever, PROMPTS, CONFIG)
    entry, = run.bank.entries.values()
    second = json.loads(who["manage"].asks[1][0].text.removeprefix(LATER_CHUNK))
    assert second["facts"][0]["related_memory_ids"] == [entry.id]
    assert second["memories"][0]["content"] == "Ben has a boat."
    # The same fact again: nothing but a second mention of the same turn.
    assert run.counts["bank/repeated"] == 1


@pytest.mark.parametrize("end", ["length", "too_long", "failed"])
@pytest.mark.parametrize("role", ["extract", "manage"])
def test_an_end_that_is_none_ends_the_session_and_keeps_the_bank(conversation, retriever, role, end):
    def stop_at_second(say):
        return lambda ask: (say(ask), end) if ask.identity.chunk else say(ask)

    says = {"extract": note_every_turn, "manage": insert_every_fact}
    who = agents(**says | {role: stop_at_second(says[role])})
    broken, = run_sessions([start_of(conversation)], who, retriever, PROMPTS, CONFIG)
    assert not broken.finished and len(broken.bank) == 2
    assert broken.counts[f"end/{end}"] == 1
    assert len(who["manage"].asks) == (1 if role == "extract" else 2)


def test_one_that_ends_does_not_stop_the_others(conversation, retriever):
    who = agents(extract=lambda ask: ("", "failed") if ask.identity.trajectory == 1
                 else note_every_turn(ask))
    runs = run_sessions([start_of(conversation, trajectory=t) for t in range(3)], who, retriever,
                        PROMPTS, CONFIG)
    assert [run.finished for run in runs] == [True, False, True]
    assert [len(run.bank) for run in runs] == [3, 0, 3]


@pytest.mark.parametrize("reply, counts", [
    ("I would insert it.", {"unread/no JSON object": 2}),
    ('{"operations": [{"operation": "DELETE", "memory_id": "beef"}]}', {"bank/unknown_id": 2}),
    ('{"operations": [{"operation": "NOOP"}, {"operation": "FIX"}]}',
     {"bank/no_operation": 2, "unread/unknown operation 'FIX'": 2})])
def test_a_managers_nonsense_changes_nothing_and_is_counted(conversation, retriever, reply, counts):
    run, = run_sessions([start_of(conversation)], agents(manage=lambda ask: reply), retriever,
                        PROMPTS, CONFIG)
    assert run.finished and run.bank is run.start.bank
    assert run.counts == {"end/stop": 4} | counts


def test_a_session_of_one_turn_is_asked_about_k_times(conversation, retriever):
    who = agents()
    run, = run_sessions([start_of(conversation, place=1)], who, retriever, PROMPTS, CONFIG)
    assert len(run.bank) == 1 and "(no further turn)" in who["extract"].asks[1][0].text


def test_a_merged_role(conversation, retriever):
    def merged(ask):
        return insert_every_fact(type(ask)(ask.identity, ask.chat, note_every_turn(ask)))

    config = EpisodeConfig(num_chunks=2, roles=("merged",))
    run, = run_sessions([start_of(conversation)], agents(merged=merged), retriever, PROMPTS, config)
    assert len(run.bank) == 3 and set(run.chats) == {"merged"}


def test_trajectories_go_on_from_their_own_banks(retriever):
    conversations = [c.first_sessions(n) for c, n in zip(sample_conversations(), (3, 2))]
    who = agents(extract=lambda ask: '{"facts": []}' if ask.identity.trajectory == 1
                 else note_every_turn(ask))
    episodes = run_trajectories(conversations, who, retriever, PROMPTS, CONFIG)
    assert [[len(t.runs) for t in row] for row in episodes] == [[3] * 3, [2] * 3]
    for row in episodes:
        turns = sum(len(session.turns) for session in row[0].conversation.sessions)
        assert [len(t.bank) for t in row] == [turns, 0, turns]
        assert row[0].bank == row[2].bank
        for trajectory in row:
            for before, after in zip(trajectory.runs, trajectory.runs[1:]):
                assert after.start.bank is before.bank
    # All trajectories of all conversations are asked together: the third session has one less.
    assert [len(asks) for asks in who["manage"].asks] == [6, 6, 6, 6, 3, 3]


def test_rerolls_share_one_bank_and_one_group(retriever):
    conversations = [c.first_sessions(n) for c, n in zip(sample_conversations(), (3, 2))]
    episodes = run_trajectories(conversations, agents(), retriever, PROMPTS, CONFIG)
    starts = choose_rerolls(episodes, CONFIG, 7, "step", 1)
    assert len(starts) == (3 + 2) * 2
    for first, second in zip(starts[::2], starts[1::2]):
        assert first.bank is second.bank
        assert first.identity("extract").group == second.identity("extract").group
        assert (first.trajectory, second.trajectory) == (0, 1)
        row = next(r for r in episodes if r[0].conversation is first.conversation)
        place = [s.number for s in first.conversation.sessions].index(first.session.number)
        assert first.bank is row[first.anchor].runs[place].start.bank
    groups = {start.identity("extract").group for start in starts}
    assert len(groups) == 5
    global_groups = {run.start.identity("extract").group
                     for row in episodes for t in row for run in t.runs}
    assert len(global_groups) == 5 and not global_groups & groups
    runs = run_sessions(starts, agents(), retriever, PROMPTS, CONFIG)
    assert all(len(run.bank) == len(run.start.bank) + len(run.start.session.turns) for run in runs)


def test_sessions_are_drawn_for_all_conversations_at_once(retriever):
    episodes = run_trajectories(sample_conversations()[:2], agents(), retriever, PROMPTS,
                                EpisodeConfig(num_chunks=1, num_trajectories=2))
    half = EpisodeConfig(num_chunks=1, num_trajectories=2, local_fraction=0.5)
    drawn = [choose_rerolls(episodes, half, seed) for seed in range(200)]
    sessions = [{c.id: {s.session.number for s in starts if s.conversation.id == c.id}
                 for c in sample_conversations()[:2]} for starts in drawn]
    assert all(len(set(map(frozenset, chosen.values()))) == 1 for chosen in sessions)
    assert sum(len(starts) for starts in drawn) / (200 * 2 * 8 * 4) == pytest.approx(0.5, abs=0.05)
    assert drawn[3] == choose_rerolls(episodes, half, 3)
    assert not choose_rerolls(episodes, EpisodeConfig(local_fraction=0.0), 3)


def test_a_request_is_named_by_its_identity_alone():
    one = Identity("c1", 0, 2, 1, "extract")
    assert one.request_id == 2916961184
    others = {Identity("c1", t, s, k, role, a).request_id for t in range(9) for s in range(9)
              for k in range(6) for role in ("extract", "manage") for a in (None, 0, 1)}
    assert len(others) == 9 * 9 * 6 * 2 * 3


def test_equal_readings_are_answered_once(conversation):
    retriever = Retriever(WordEncoder(), SearchConfig(threshold=0.0))
    full, = run_sessions([start_of(conversation)], agents(), retriever, PROMPTS, CONFIG)
    empty = Bank(conversation.speakers)
    agent = Scripted(lambda ask: "So: <answer>a boat</answer>" if "bought" in ask.text else "?")
    questions = conversation.questions[:2]
    rows = answer_questions(
        [("c1", full.bank, questions), ("c1", empty, questions), ("c1", full.bank, questions)],
        agent, retriever, PROMPTS)
    assert len(agent.asks[0]) == 4
    assert rows[0] == rows[2] and rows[0][0].text == "a boat" and rows[0][0].tagged
    assert (rows[1][0].text, rows[1][0].tagged, rows[1][0].dia_ids) == ("", False, frozenset())
    assert not rows[0][0].failed


def test_a_failed_answer_is_marked_and_none_is_asked_for_nothing(conversation, retriever):
    agent = Scripted(lambda ask: ("", "failed"))
    (answer,), nothing = answer_questions(
        [("c1", Bank(conversation.speakers), conversation.questions[:1]),
         ("c1", Bank(conversation.speakers), [])], agent, retriever, PROMPTS)
    assert answer.failed and nothing == []
    assert answer_questions([], agent, retriever, PROMPTS) == [] and len(agent.asks) == 1


@pytest.mark.parametrize("settings, message", [
    ({"roles": ("manage",)}, "roles must be"), ({"num_chunks": 0}, "num_chunks must be at least 1"),
    ({"local_fraction": 1.1}, r"local_fraction must lie in \[0, 1\]")])
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        EpisodeConfig(**settings)
