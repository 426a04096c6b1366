import json

import pytest


def _atom(atom_id, block_id, text, level="A", action=None):
    return {
        "atom_id": atom_id,
        "parent_memory_id": block_id,
        "text": text,
        "u_star": level,
        "memory_action": action or ("ignore" if level == "A" else "apply"),
        "usage_rubric": {"correct_use": "as needed"},
    }


def _record(record_id="r1", domain="general"):
    """Three blocks of 2, 1 and 3 atoms; the text of a2 has white space at both ends."""
    return {
        "id": record_id,
        "domain": domain,
        "question": "What should I cook?",
        "memory_blocks": [
            {
                "parent_memory_id": "b1",
                "memory_text": "A vegan with a gas stove.",
                "atomic_concat_text": "The user is vegan. The user has a gas stove.",
                "atom_ids": ["a1", "a2"],
            },
            {
                "parent_memory_id": "b2",
                "memory_text": "Once went to Oslo.",
                "atomic_concat_text": "The user visited Oslo.",
                "atom_ids": ["a3"],
            },
            {
                "parent_memory_id": "b3",
                "memory_text": "Has a cat, a dog and a drum.",
                "atomic_concat_text": "A cat. A dog. A drum.",
                "atom_ids": ["a4", "a5", "a6"],
            },
        ],
        "memories": [
            _atom("a1", "b1", "The user is vegan.", "C"),
            _atom("a2", "b1", " The user has a gas stove.\n", "B", "correct"),
            _atom("a3", "b2", "The user visited Oslo."),
            _atom("a4", "b3", "A cat."),
            _atom("a5", "b3", "A dog."),
            _atom("a6", "b3", "A drum."),
        ],
    }


@pytest.fixture
def make_record_json():
    """Makes the JSON value of a well-formed record."""
    return _record


@pytest.fixture
def write_jsonl(tmp_path):
    """Writes values (or raw bytes) as the lines of a file and returns its path."""

    def write(*lines, name="records.jsonl"):
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path = tmp_path / name
        path.write_bytes(b"".join(line + b"\n" for line in raw))
        return path

    return write


@pytest.fixture
def record(make_record_json, write_jsonl):
    from memcalib_jax.data import load_records

    return load_records(write_jsonl(make_record_json()))[0]
