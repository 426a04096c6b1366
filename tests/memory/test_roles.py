"""Prompts, what roles read, and how replies are read."""

import json

import pytest

from memcalib_jax.memory.bank import Delete, Entry, Insert, NoOperation, Update
from memcalib_jax.memory.conversations import Session, Turn
from memcalib_jax.memory.roles import (
    LATER_CHUNK, PROMPT_NAMES, SCHEMAS, Fact, answer_text, extractor_text, load_prompts,
    manager_text, merged_text, parse_answer, parse_facts, parse_operations)

SPEAKERS = ("Ann", "Ben")
SESSION = Session(2, "8 am on 1 May", (Turn("D2:1", "Ann", "Any news?"),
                                      Turn("D2:2", "Ben", "A boat!", "a red boat")))
ENTRY = Entry("00ff00ff", "Ben", "Ben likes boats.", 1, "noon", ("D1:1", "D1:4"))
INSERT = {"operation": "INSERT", "speaker": "Ben", "content": "Ben has a boat.", "dia_id": "D2:2"}


def test_what_the_extractor_reads():
    assert extractor_text(SESSION, SESSION.turns, 0) == (
        "Time of the session: 8 am on 1 May\n[D2:1] Ann: Any news?\n"
        "[D2:2] Ben: A boat! [Sent an image showing a red boat]")
    assert extractor_text(SESSION, (), 5) == (
        LATER_CHUNK + "Time of the session: 8 am on 1 May\n(no further turn)")


def test_what_the_manager_reads():
    text = manager_text([ENTRY], [Fact("Ben", "D2:2", "Ben has a boat.")], [["00ff00ff"]], 1)
    assert text.startswith(LATER_CHUNK)
    assert json.loads(text.removeprefix(LATER_CHUNK)) == {
        "memories": [{"memory_id": "00ff00ff", "session_time": "noon", "speaker": "Ben",
                      "content": "Ben likes boats.", "dia_ids": ["D1:1", "D1:4"]}],
        "facts": [{"speaker": "Ben", "dia_id": "D2:2", "fact": "Ben has a boat.",
                   "related_memory_ids": ["00ff00ff"]}]}
    assert merged_text(SESSION, SESSION.turns, [ENTRY], 0).startswith("Time of the session: 8 am")
    assert '"memory_id": "00ff00ff"' in merged_text(SESSION, SESSION.turns, [ENTRY], 0)


def test_what_the_answer_agent_reads():
    assert answer_text("What does Ben like?", {"Ann": [], "Ben": [ENTRY]}) == (
        "Memories of Ann:\n(none)\n\nMemories of Ben:\n- [noon] Ben likes boats.\n\n"
        "Question: What does Ben like?")


@pytest.mark.parametrize("wrap", [
    "{}", "```json\n{}\n```", "Here you are: {} Enjoy.", "First thoughts\n```\n{}\n```\nDone."])
def test_a_reply_in_any_dress(wrap):
    reply = wrap.replace("{}", json.dumps({"operations": [INSERT]}))
    parsed = parse_operations(reply, SPEAKERS)
    assert parsed.items == (Insert("Ben", "Ben has a boat.", "D2:2"),) and not parsed.problems


def test_facts():
    rows = [{"speaker": "ben", "dia_id": "D2:2", "fact": " Ben  has\na boat. "},
            {"speaker": "Ann", "dia_id": ["D2:1", "D2:2"], "fact": "x"},
            {"speaker": "Ann", "dia_id": "[D2:1, D2:2]", "fact": "y"}]
    assert parse_facts(json.dumps({"facts": rows}), SPEAKERS).items == (
        Fact("Ben", "D2:2", "Ben has a boat."), Fact("Ann", "D2:1", "x"), Fact("Ann", "D2:1", "y"))


def test_operations():
    rows = [INSERT, {"operation": "update", "memory_id": "ab", "content": "c", "dia_id": "D1:1"},
            {"operation": "DELETE", "memory_id": "cd"}, {"operation": "NOOP"}]
    parsed = parse_operations(json.dumps({"operations": rows}), SPEAKERS)
    assert parsed.items[1:] == (Update("ab", "c", "D1:1"), Delete("cd"), NoOperation())
    assert parse_operations('{"operations": []}', SPEAKERS).items == ()


@pytest.mark.parametrize("change, problem", [
    ({"speaker": "Cid"}, "unknown speaker"), ({"speaker": 7}, "no speaker"),
    ({"content": "  "}, "no content"), ({"dia_id": None}, "no dia_id"), ({"dia_id": []}, "no dia_id"),
    ({"operation": "MERGE"}, "unknown operation 'MERGE'"), ({"operation": "UPDATE"}, "no memory_id")])
def test_a_bad_item_is_left_out_with_its_reason(change, problem):
    parsed = parse_operations(json.dumps({"operations": [INSERT | change, INSERT]}), SPEAKERS)
    assert len(parsed.items) == 1 and parsed.problems == (problem,)


@pytest.mark.parametrize("reply, problem", [
    ("I would keep the boat.", "no JSON object"), ("", "no JSON object"),
    ('{"operations": [{"operation": "INS', "no JSON object"),
    ('{"facts": []}', "no list of operations"), ('{"operations": "none"}', "no list of operations"),
    ('{"operations": ["INSERT"]}', "no operation"), ("[1, 2]", "no JSON object"),
    ("[" * 100_000, "no JSON object")])
def test_a_bad_reply_is_no_operation_and_a_reason(reply, problem):
    parsed = parse_operations(reply, SPEAKERS)
    assert parsed.items == () and parsed.problems == (problem,)


@pytest.mark.parametrize("reply, answer", [
    ("So ... <answer> the ferry </answer>", ("the ferry", True)),
    ("<answer>a</answer> no: <ANSWER>b\nc</ANSWER>", ("b\nc", True)),
    ("Thus\n**Answer:** the ferry.", ("the ferry", False)),
    ("Final answer: 7 May 2023", ("7 May 2023", False)),
    ("The ferry.", ("", False)), ("<answer>cut off", ("", False)), ("", ("", False))])
def test_answers(reply, answer):
    assert parse_answer(reply) == answer


def test_prompts_can_be_replaced(tmp_path):
    ours = load_prompts()
    assert set(ours) == set(PROMPT_NAMES)
    (tmp_path / "answer.txt").write_text("Answer in Latin.\n")
    assert load_prompts(tmp_path) == ours | {"answer": "Answer in Latin."}


@pytest.mark.parametrize("name, content, message", [
    ("reply.txt", b"x", "there is no such prompt, only extract.txt"), ("answer.txt", b" ", "empty"),
    ("answer.txt", b"\xff", "cannot be read"), ("answer.md", b"x", "holds no prompt")])
def test_bad_prompts_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_prompts(tmp_path)


def test_our_prompts_show_the_forms_that_are_read():
    prompts = load_prompts()
    for name in ("manage", "merged"):
        for row in SCHEMAS[name]["properties"]["operations"]["items"]["anyOf"]:
            shown = {key: "..." for key in row["properties"]}
            shown["operation"] = row["properties"]["operation"]["enum"][0]
            assert json.dumps(shown) in prompts[name]
    fact = dict.fromkeys(SCHEMAS["extract"]["properties"]["facts"]["items"]["properties"], "...")
    assert json.dumps({"facts": [fact]}) in prompts["extract"]
    assert "<answer>" in prompts["answer"]
