import copy
import json
import pickle
import warnings

import pytest

from memcalib_jax.data import Atom, Block, Record, RecordError, load_records, sample_path


def test_reads_every_field_in_file_order(make_record_json, write_jsonl):
    first, second = make_record_json("r1"), make_record_json("r2", domain="coding")
    records = load_records(write_jsonl(first, second))
    assert [record.id for record in records] == ["r1", "r2"]
    assert records[1] == Record(
        id="r2",
        domain="coding",
        question="What should I cook?",
        blocks=(
            Block(
                "b1",
                "A vegan with a gas stove.",
                "The user is vegan. The user has a gas stove.",
                ("a1", "a2"),
            ),
            Block("b2", "Once went to Oslo.", "The user visited Oslo.", ("a3",)),
            Block(
                "b3", "Has a cat, a dog and a drum.", "A cat. A dog. A drum.", ("a4", "a5", "a6")
            ),
        ),
        atoms=(
            Atom("a1", "b1", "The user is vegan.", 2, "apply", {"correct_use": "as needed"}),
            Atom(
                "a2",
                "b1",
                " The user has a gas stove.\n",
                1,
                "correct",
                {"correct_use": "as needed"},
            ),
            Atom("a3", "b2", "The user visited Oslo.", 0, "ignore", {"correct_use": "as needed"}),
            Atom("a4", "b3", "A cat.", 0, "ignore", {"correct_use": "as needed"}),
            Atom("a5", "b3", "A dog.", 0, "ignore", {"correct_use": "as needed"}),
            Atom("a6", "b3", "A drum.", 0, "ignore", {"correct_use": "as needed"}),
        ),
    )


def test_a_clean_file_reads_without_a_warning(make_record_json, write_jsonl):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load_records(write_jsonl(make_record_json()))) == 1
        assert len(load_records(sample_path("records.jsonl"))) == 48


# Each case changes one thing of a good record; `old` and `new` are values at the JSON path.
MALFORMED_RECORDS = [
    ("id", 7, "id", "a string, not a number"),
    ("id", " ", "id", "empty"),
    ("id", ..., "id", "missing"),
    ("domain", None, "domain", "null"),
    ("question", "", "question", "empty"),
    ("question", ["x"], "question", "a list"),
    ("question", True, "question", "a boolean"),
    ("memory_blocks", {}, "memory_blocks", "a list, not an object"),
    ("memory_blocks", [], "memory_blocks", "at least one block"),
    ("memory_blocks.1", "b2", "memory_blocks[1]", "an object, not a string"),
    ("memory_blocks.1.parent_memory_id", "b1", "memory_blocks[1].parent_memory_id", "repeated"),
    ("memory_blocks.1.memory_text", "\t", "memory_blocks[1].memory_text", "empty"),
    ("memory_blocks.1.memory_text", ..., "memory_blocks[1].memory_text", "missing"),
    ("memory_blocks.1.atom_ids", [], "memory_blocks[1].atom_ids", "at least one atom"),
    ("memory_blocks.1.atom_ids", "a3", "memory_blocks[1].atom_ids", "a list, not a string"),
    ("memory_blocks.1.atom_ids", [3], "memory_blocks[1].atom_ids[0]", "a string, not a number"),
    ("memory_blocks.1.atom_ids", [""], "memory_blocks[1].atom_ids[0]", "empty"),
    ("memory_blocks.1.atom_ids", ["zz"], "memory_blocks[1].atom_ids", "'zz'"),
    ("memory_blocks.1.atom_ids", ["a3", "a3"], "memory_blocks[1].atom_ids", "'a3'"),
    ("memory_blocks.1.atom_ids", ["a3", "a1"], "memory_blocks[0].atom_ids", "'a1'"),
    ("memory_blocks.2.atom_ids", ["a4", "a6"], "memories[4].atom_id", "'a5' is in no block"),
    (
        "memory_blocks.0.atomic_concat_text",
        "The user is vegan.  The user has a gas stove.\n",
        "memory_blocks[0].atomic_concat_text",
        "stripped texts",
    ),
    (
        "memory_blocks.2.atom_ids",
        ["a5", "a4", "a6"],
        "memory_blocks[2].atomic_concat_text",
        "stripped texts",
    ),
    ("memories", None, "memories", "null"),
    ("memories", [], "memory_blocks[0].atom_ids", "'a1'"),
    ("memories.3", [], "memories[3]", "an object, not a list"),
    ("memories.3.atom_id", "a3", "memories[3].atom_id", "repeated"),
    ("memories.3.atom_id", 4.0, "memories[3].atom_id", "a number"),
    ("memories.3.parent_memory_id", "b1", "memories[3].parent_memory_id", "'b3'"),
    ("memories.3.text", "", "memories[3].text", "empty"),
    ("memories.3.u_star", "D", "memories[3].u_star", "A, B, C, not 'D'"),
    ("memories.3.u_star", "AB", "memories[3].u_star", "not 'AB'"),
    ("memories.3.u_star", "a", "memories[3].u_star", "not 'a'"),
    ("memories.3.u_star", 0, "memories[3].u_star", "a number"),
    ("memories.3.memory_action", "use", "memories[3].memory_action", "'use'"),
    ("memories.3.usage_rubric", "x", "memories[3].usage_rubric", "an object, not a string"),
    ("memories.3.usage_rubric", ..., "memories[3].usage_rubric", "missing"),
]


@pytest.mark.parametrize("place, value, field, problem", MALFORMED_RECORDS)
def test_refuses_a_malformed_record(
    place, value, field, problem, make_record_json, write_jsonl
):
    bad = copy.deepcopy(make_record_json("r2"))
    *parents, key = [int(part) if part.isdigit() else part for part in place.split(".")]
    target = bad
    for part in parents:
        target = target[part]
    if value is ...:
        del target[key]
    else:
        target[key] = value
    path = write_jsonl(make_record_json("r1"), bad)
    with pytest.raises(RecordError) as caught:
        load_records(path)
    error = caught.value
    assert (error.path, error.line, error.field) == (str(path), 2, field)
    assert error.record_id == (None if field == "id" else "r2")
    assert problem in str(error)
    assert f"{path}, line 2" in str(error) and f"field {field}" in str(error)


NESTED = b'{"id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    "line, problem",
    [
        (b'{"id": "r2"', "not valid JSON"),
        (b'{"id": "r2"} {}', "not valid JSON"),
        (b'{"id": "r2", "id": "r3"}', "'id' stands twice"),
        (b'{"id": NaN}', "NaN is not a JSON number"),
        (b'{"id": "r2", "x": [-Infinity]}', "-Infinity is not a JSON number"),
        (b'{"id": "nul \x00 byte"}', "not valid JSON"),
        (b'{"id": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (NESTED, "not valid JSON"),
        (b'{"id": "caf\xe9"}', "not UTF-8 (byte 12 of the line)"),
        (b'{"id": "\\ud83d"}', "surrogate"),
        (b'["r2"]', "must be a JSON object, not a list"),
        (b'"r2"', "must be a JSON object, not a string"),
        (b"null", "must be a JSON object, not null"),
        (b"3", "must be a JSON object, not a number"),
    ],
)
def test_refuses_a_line_that_is_no_object(line, problem, make_record_json, write_jsonl):
    path = write_jsonl(make_record_json("r1"), b"", line)
    with pytest.raises(RecordError) as caught:
        load_records(path)
    assert (caught.value.path, caught.value.line) == (str(path), 3)
    assert problem in str(caught.value)


def test_refuses_a_repeated_record_id(make_record_json, write_jsonl):
    path = write_jsonl(make_record_json("r1"), make_record_json("r2"), make_record_json("r1"))
    with pytest.raises(RecordError, match="repeats the id of line 1") as caught:
        load_records(path)
    assert (caught.value.line, caught.value.record_id, caught.value.field) == (3, "r1", "id")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"  \r\n"])
def test_refuses_a_file_without_records(content, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="holds no record") as caught:
        load_records(path)
    assert (caught.value.path, caught.value.line) == (str(path), None)


def test_refuses_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(RecordError, match="no such file"):
        load_records(tmp_path / "absent.jsonl")
    with pytest.raises(RecordError, match="this is a folder"):
        load_records(tmp_path)


def test_the_error_survives_pickling():
    error = RecordError("is wrong", path="p", line=3, record_id="r", field="f")
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error) == "p, line 3, record 'r', field f: is wrong"
    assert (copied.path, copied.line, copied.record_id, copied.field) == ("p", 3, "r", "f")


def _warnings_of(path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = load_records(path)
    return records, [str(warning.message) for warning in caught], caught


def _with(record, level, action):
    record["memories"][3].update(u_star=level, memory_action=action)
    return record


@pytest.mark.parametrize(
    "level, action, contradicts",
    [
        ("A", "ignore", False),
        ("A", "apply", True),
        ("A", "correct", True),
        ("B", "ignore", True),
        ("B", "apply", False),
        ("B", "correct", False),
        ("C", "ignore", True),
        ("C", "apply", False),
        ("C", "correct", False),
    ],
)
def test_warns_of_an_action_that_contradicts_the_level(
    level, action, contradicts, make_record_json, write_jsonl
):
    path = write_jsonl(_with(make_record_json(), level, action))
    records, messages, _ = _warnings_of(path)
    assert records[0].atoms[3].ideal == "ABC".index(level)
    assert len(messages) == contradicts
    if contradicts:
        assert f"{path}, line 1: memories[3]: action '{action}'" in messages[0]


def test_warns_once_of_each_kind_with_the_first_line(make_record_json, write_jsonl):
    lines = [make_record_json(f"r{number}") for number in range(4)]
    for line in lines[1:]:
        line["domain"] = "law"
        line["_note"] = "x"
        line["memories"][0].update(u_star="A", memory_action="ignore", comment="x")
        line["memories"][1].update(u_star="A", memory_action="apply")
    raw = [json.dumps(line).encode() for line in lines]
    raw[0] = b"\xef\xbb\xbf" + raw[0]
    path = write_jsonl(*raw, b"", b" \t")
    records, messages, caught = _warnings_of(path)
    assert [record.id for record in records] == ["r0", "r1", "r2", "r3"]
    assert records[3].domain == "law"
    expected = [
        "line 1: the file starts with a byte-order mark",
        "line 2: unknown key '_note'",
        "line 2: domain 'law'",
        "line 2: memories[1]: action 'apply' contradicts level A",
        "line 2: record 'r1' has no B or C atom",
        "line 5: blank line",
    ]
    assert len(messages) == len(expected)
    for what in expected:
        assert sum(f"{path}, {what}" in message for message in messages) == 1
    assert {warning.filename for warning in caught} == {__file__}


def test_only_line_feeds_end_a_line(make_record_json, tmp_path):
    first, second = make_record_json("r1"), make_record_json("r2")
    question = "One\u2028two\x00three\x85four\x0cfive\rsix\nseven"
    first["question"] = question
    text = json.dumps(first, ensure_ascii=False) + "\r\n" + json.dumps(second)
    path = tmp_path / "records.jsonl"
    path.write_bytes(text.encode())
    records, messages, _ = _warnings_of(path)
    assert [record.id for record in records] == ["r1", "r2"]
    assert records[0].question == question
    assert messages == []
