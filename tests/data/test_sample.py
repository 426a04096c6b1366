import copy
from collections import Counter

import pytest

from memcalib_jax.data import (
    RecordError,
    SampleResponse,
    load_records,
    load_responses,
    sample_path,
)

LINE = {"id": "r1", "variant": "overuse", "response": "Hm.", "levels": {"a1": "C", "a2": "A"}}


def test_the_sample_is_whole():
    records = {record.id: record for record in load_records(sample_path("records.jsonl"))}
    responses = load_responses(sample_path("responses.jsonl"))
    assert len(records) == 48 and len(responses) == 144
    variants = Counter((response.record_id, response.variant) for response in responses)
    assert variants == {
        (id, variant): 1 for id in records for variant in ("calibrated", "overuse", "underuse")
    }
    for response in responses:
        atoms = records[response.record_id].atoms
        assert set(response.levels) == {atom.id for atom in atoms}
        if response.variant == "calibrated":
            assert response.levels == {atom.id: atom.ideal for atom in atoms}


def test_reads_a_response(write_jsonl):
    assert load_responses(write_jsonl(LINE)) == [
        SampleResponse("r1", "overuse", "Hm.", {"a1": 2, "a2": 0})
    ]


@pytest.mark.parametrize(
    "key, value, field",
    [
        ("id", "", "id"),
        ("variant", "mild", "variant"),
        ("variant", 1, "variant"),
        ("response", None, "response"),
        ("levels", [], "levels"),
        ("levels", {"a1": "D"}, "levels.a1"),
        ("levels", {"a1": 2}, "levels.a1"),
        ("levels", {"a1": ["A"]}, "levels.a1"),
    ],
)
def test_refuses_a_malformed_response(key, value, field, write_jsonl):
    bad = copy.deepcopy(LINE)
    bad[key] = value
    path = write_jsonl(dict(LINE, variant="underuse"), bad)
    with pytest.raises(RecordError) as caught:
        load_responses(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (str(path), 2, field)


def test_refuses_a_repeated_variant(write_jsonl):
    with pytest.raises(RecordError, match="'overuse' is repeated"):
        load_responses(write_jsonl(LINE, LINE))


def test_refuses_an_unknown_sample():
    with pytest.raises(ValueError, match="no 'other.jsonl', only records.jsonl, responses.jsonl"):
        sample_path("other.jsonl")
