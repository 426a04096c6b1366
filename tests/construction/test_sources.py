"""Rows of the public formats, as their data sets have them, become samples."""

import gzip
import json

import pytest

from memcalib_jax.construction.sources import SourceFile, check_field_map, plain_text, read_rows
from memcalib_jax.data import RecordError


def read(tmp_path, rows, spec, field_map=None, name="rows.jsonl"):
    path = tmp_path / name
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text(lines)
    return list(read_rows(SourceFile.parse(f"{spec}:{path}" if spec else str(path)), field_map))


def sample(tmp_path, row, spec, **options):
    [found] = read(tmp_path, [row], spec, **options)
    assert found.problem is None, found.problem
    return found.sample


PATIENT, DOCTOR = "patient: I have had a cough for two weeks.", "doctor: See your GP: now."


def test_meddialog(tmp_path):
    found = sample(tmp_path, {"description": "Q. Is my cough serious?",
                              "utterances": [PATIENT, DOCTOR]}, "meddialog", name="rows.json")
    assert found.pop("id").startswith("meddialog-")
    assert found == {"source": "meddialog", "domain": "health_seed",
                     "context": "I have had a cough for two weeks.",
                     "question": "Is my cough serious?", "reference_answer": "See your GP: now."}


@pytest.mark.parametrize("turns", [
    {"speaker": [0, 1], "utterance": ["I cough.", "Rest."]},
    [{"speaker": "Patient", "utterance": "I cough."}, {"speaker": "Doctor", "utterance": "Rest."}]])
def test_meddialog_by_turns(tmp_path, turns):
    found = sample(tmp_path, {"dialogue_id": 12, "dialogue_turns": turns}, "meddialog")
    assert (found["id"], found["context"], found["question"], found["reference_answer"]) == (
        "meddialog-12", "", "I cough.", "Rest.")


def test_chatdoctor(tmp_path):
    row = {"instruction": "If you are a doctor, answer.", "input": "I cough.", "output": "Rest."}
    found = sample(tmp_path, row, "chatdoctor")
    assert (found["question"], found["reference_answer"]) == ("I cough.", "Rest.")
    # Rows have no ids of their own: equal content has one id, other content another.
    assert found["id"] == sample(tmp_path, row, "chatdoctor")["id"]
    assert found["id"] != sample(tmp_path, row | {"output": "Run."}, "chatdoctor")["id"]


@pytest.mark.parametrize("row, id", [
    ({"id": "0", "data": ["How?", "So.", "Really?", "Yes."]}, "ultrachat-0"),
    ({"prompt": "How?", "prompt_id": "f00", "messages": [
        {"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]},
     "ultrachat-f00")])
def test_ultrachat(tmp_path, row, id):
    found = sample(tmp_path, row, "ultrachat")
    assert (found["id"], found["domain"], found["question"], found["reference_answer"]) == (
        id, "general", "How?", "So.")


def test_openassistant_trees(tmp_path):
    prompt = {"message_id": "p1", "text": "How?", "role": "prompter", "lang": "en", "replies": [
        {"text": "Badly.", "rank": 1}, {"text": "Well.", "rank": 0},
        {"text": "Gone.", "rank": 0, "deleted": True}]}
    tree = {"message_tree_id": "p1", "tree_state": "ready_for_export", "prompt": prompt}
    german = {"message_tree_id": "p2", "prompt": prompt | {"lang": "de"}}
    good, bad = read(tmp_path, [tree, german], "openassistant", name="trees.jsonl.gz")
    assert (good.sample["id"], good.sample["reference_answer"]) == ("openassistant-p1", "Well.")
    assert bad.problem[0] == "non_english"


def test_openassistant_messages(tmp_path):
    rows = [{"message_id": "p1", "parent_id": None, "text": "How?", "lang": "en"},
            {"message_id": "a1", "parent_id": "p1", "text": "Badly.", "rank": 1},
            {"message_id": "a2", "parent_id": "p1", "text": "Well.", "rank": 0},
            {"message_id": "p2", "parent_id": "a2", "text": "Why?"}]
    [found] = read(tmp_path, rows, "openassistant")
    assert (found.sample["question"], found.sample["reference_answer"]) == ("How?", "Well.")


@pytest.mark.parametrize("solutions, answer", [
    (["print(1)", "print(2)"], "print(1)"), (json.dumps(["print(1)"]), "print(1)"), ("", "")])
def test_apps(tmp_path, solutions, answer):
    row = {"problem_id": 7, "question": "Sum two numbers.", "solutions": solutions,
           "starter_code": "def f():", "input_output": "{}", "difficulty": "interview"}
    found = sample(tmp_path, row, "apps")
    assert (found["id"], found["domain"], found["context"], found["reference_answer"]) == (
        "apps-7", "coding", "def f():", answer)


def test_stack_exchange(tmp_path):
    row = {"qid": 31, "question": "<p>Why is <code>x &lt; y</code> slow?</p>\n<pre>a\n  b</pre>",
           "answers": [{"answer_id": 1, "pm_score": 9, "selected": False, "text": "<p>No.</p>"},
                       {"answer_id": 2, "pm_score": 3, "selected": True, "text": "<p>Yes</p>"}],
           "date": "2023/01/01", "metadata": ["https://example.com"]}
    found = sample(tmp_path, row, "stack_exchange")
    assert (found["id"], found["question"], found["reference_answer"]) == (
        "stack_exchange-31", "Why is x < y slow?\n\na\n  b", "Yes")
    assert sample(tmp_path, row, "stack_exchange@general")["domain"] == "general"


def test_magicoder(tmp_path):
    row = {"lang": "python", "raw_index": 5, "index": 9, "seed": "x = 1", "problem": "Do it.",
           "solution": "Done."}
    found = sample(tmp_path, row, "magicoder")
    assert (found["id"], found["question"], found["reference_answer"]) == (
        "magicoder-9", "Do it.", "Done.")


def test_a_field_map_names_keys_and_constants(tmp_path):
    field_map = {"id": "qid", "source": "=forum", "domain": "=general", "context": "body",
                 "question": "title", "reference_answer": "best"}
    check_field_map(field_map)
    row = {"qid": 3, "body": "B", "title": "T", "best": "A", "other": 1}
    assert sample(tmp_path, row, "", field_map=field_map) == {
        "id": "3", "source": "forum", "domain": "general", "context": "B", "question": "T",
        "reference_answer": "A"}
    with pytest.raises(ValueError, match="'answer' is none of the fields"):
        check_field_map({"answer": "best"})


@pytest.mark.parametrize("spec, row", [
    ("meddialog", {"text": "x"}), ("chatdoctor", {"input": "x"}), ("ultrachat", {"data": ["x"]}),
    ("ultrachat", {"messages": [{"text": "x"}]}), ("openassistant", {"a": 1}),
    ("openassistant", {"prompt": {}}), ("apps", {"question": "x"}),
    ("apps", {"question": "x", "solutions": "{"}), ("stack_exchange", {"qid": 1, "answers": []}),
    ("stack_exchange", {"qid": 1, "question": "x", "answers": []}), ("magicoder", {"problem": 1}),
    ("meddialog", {"utterances": [3]})])
def test_rows_of_another_format_are_named(tmp_path, spec, row):
    [found] = read(tmp_path, [row], spec)
    assert found.sample is None and found.problem[0] == "malformed_row"
    assert found.place == "rows.jsonl:1"


def test_a_bad_line_leaves_the_others(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"input": "a", "output": "b"}\n\n[1]\n{"input": "c", "output": "d"}')
    found = list(read_rows(SourceFile.parse(f"chatdoctor:{path}")))
    assert [row.place for row in found] == ["rows.jsonl:1", "rows.jsonl:3", "rows.jsonl:4"]
    assert [row.sample and row.sample["question"] for row in found] == ["a", None, "c"]


@pytest.mark.parametrize("content, name", [(b"\x1f\x8bnonsense", "x.gz"), (b"plain", "x.gz"),
                                           (gzip.compress(b"{}" * 999, mtime=0)[:-20], "x.gz")])
def test_a_damaged_archive_is_said(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordError, match="cannot be read"):
        list(read_rows(SourceFile.parse(f"apps:{tmp_path / name}")))


def test_what_a_source_is_called():
    assert SourceFile.parse("a/b.jsonl") == SourceFile("a/b.jsonl")
    assert SourceFile.parse("apps@general:x:y.jsonl") == SourceFile("x:y.jsonl", "apps", "general")
    for text, message in (("alpaca:x.jsonl", "none of the formats"),
                          ("apps@law:x.jsonl", "none of the domains")):
        with pytest.raises(ValueError, match=message):
            SourceFile.parse(text)


def test_markup_becomes_text():
    assert plain_text("<p>a &amp; b</p><ul><li>c</li></ul>").split() == ["a", "&", "b", "c"]
