import json

import pytest

from memcalib_jax.data import LEVELS, RecordError, load_records, sample_path
from memcalib_jax.data.demonstrations import load_demonstrations, sample_demonstrations
from memcalib_jax.data.prompts import SYSTEM_PROMPT
from memcalib_jax.data.teacher import TEACHER_INSTRUCTIONS, teacher_messages

RECORDS = load_records(sample_path("records.jsonl"))


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n"
                            for row in rows))
    return path


def row(index, text, **more):
    return {"id": RECORDS[index].id, "response": text} | more


def test_responses_come_in_the_records_order(tmp_path):
    path = write(tmp_path / "responses.jsonl", row(2, "two"), row(0, "zero", made_by="someone"))
    found = load_demonstrations(path, RECORDS[:3])
    assert [(d.record.id, d.response) for d in found] == [
        (RECORDS[0].id, "zero"), (RECORDS[2].id, "two")]


def test_the_sample_has_a_calibrated_response_to_each_record():
    found = sample_demonstrations(RECORDS)
    assert [d.record for d in found] == RECORDS
    assert found[0].response.startswith("Start gently and build up.")


@pytest.mark.parametrize("rows, parts", [
    ([row(0, "a"), {"id": "nobody", "response": "b"}], ["line 2", "'nobody'", "none of the"]),
    ([row(0, "a"), row(1, "b"), row(0, "c")], ["line 3", RECORDS[0].id, "line 1"]),
    ([row(0, "  ")], ["line 1", "field response", "empty"]),
    ([{"id": RECORDS[0].id}], ["line 1", "field response", "missing"]),
    ([row(0, 3)], ["line 1", "field response", "a number"]),
    (["{"], ["line 1", "not valid JSON"]),
    ([], ["holds no record"]),
])
def test_bad_files_are_refused_by_place(tmp_path, rows, parts):
    with pytest.raises(RecordError) as error:
        load_demonstrations(write(tmp_path / "responses.jsonl", *rows), RECORDS[:2])
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("representation", ["atomic", "fluent"])
def test_a_teacher_sees_the_prompt_the_levels_and_the_rubrics(representation):
    record = RECORDS[0]
    system, user = teacher_messages(record, representation=representation)
    assert system["content"] == f"{SYSTEM_PROMPT}\n\n{TEACHER_INSTRUCTIONS}"
    prompt, guidance = user["content"].split("\n\nHow to use the memories:\n")
    block = record.blocks[0]
    shown, other = block.fluent_text, block.atomic_text
    if representation == "atomic":
        shown, other = other, shown
    assert shown in prompt and other not in prompt
    assert prompt.endswith(record.question)
    assert json.loads(guidance) == [
        {"statement": atom.text, "level": LEVELS[atom.ideal], "rubric": atom.rubric}
        for atom in record.atoms]


def test_instructions_can_be_replaced():
    system, _ = teacher_messages(RECORDS[0], instructions="Use them well.")
    assert system["content"] == f"{SYSTEM_PROMPT}\n\nUse them well."
