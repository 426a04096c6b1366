import json

import pytest

from memcalib_jax.judge import DEFAULT_INSTRUCTIONS, judge_messages, load_instructions


def test_payload(record):
    system, user = judge_messages(record, "Äpfel.")
    assert system == {"role": "system", "content": DEFAULT_INSTRUCTIONS}
    assert user["role"] == "user" and "Äpfel" in user["content"]
    assert json.loads(user["content"]) == {
        "query": "What could I snack on?",
        "memory_blocks": [
            {"id": "m1", "text": "Peanuts are out; a nephew plays."},
            {"id": "m2", "text": "They like a crunch."},
        ],
        "response": "Äpfel.",
        "atoms": [
            {
                "atom_id": "a1",
                "text": "The user has a diagnosed peanut allergy.",
                "u_star": "C",
                "usage_rubric": {"over_use": "x"},
            },
            {
                "atom_id": "a2",
                "text": "The user's nephew plays the trombone.",
                "u_star": "A",
                "usage_rubric": {"over_use": "y"},
            },
            {
                "atom_id": "a3",
                "text": "The user likes crunchy food.",
                "u_star": "B",
                "usage_rubric": {"over_use": "z"},
            },
        ],
    }


def test_instructions_name_every_field_of_payload_and_reply(record):
    payload = json.loads(judge_messages(record, "x")[1]["content"])
    fields = {*payload, *payload["atoms"][0]} - {"text"}
    fields |= {"atom_judgments", "predicted_usage_level", "evidence_quote", "reason"}
    assert [field for field in fields if f'"{field}"' not in DEFAULT_INSTRUCTIONS] == []


def test_own_instructions(record, tmp_path):
    path = tmp_path / "judge.txt"
    path.write_text("Judge, bitte: prüfe.\n", encoding="utf-8")
    messages = judge_messages(record, "x", instructions=load_instructions(path))
    assert messages[0]["content"] == "Judge, bitte: prüfe.\n"


def test_bad_instruction_files(tmp_path):
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in (
        (empty, "are empty"),
        (binary, "UTF-8"),
        (tmp_path / "none.txt", "No such file"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            load_instructions(path)
        assert str(path) in str(caught.value)


def test_a_blind_judge_sees_no_target(record):
    messages = judge_messages(record, "x", instructions="Judge.", blind=True)
    told, sighted = (json.loads(messages[1]["content"]),
                     json.loads(judge_messages(record, "x")[1]["content"]))
    assert told.pop("atoms") == [{"atom_id": atom.id, "text": atom.text} for atom in record.atoms]
    assert sighted.pop("atoms") and told == sighted
