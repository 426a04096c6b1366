"""The journal of judgments."""

import json

import pytest

from memcalib_jax.judge import AtomJudgment, Judgment
from memcalib_jax.jsonlines import DamagedFile
from memcalib_jax.training.judging import Journal

VALID = Judgment((2, 0), True, None, (AtomJudgment("a", 2, "tea \ud83d", "why"),
                                      AtomJudgment("b", 0, "", "no")))
FAILED = Judgment.invalid("timeout: no answer within 2 s")


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "step_1.jsonl")
    journal.put(("r", 0, "hash"), VALID)
    journal.put(("r", 1, "hash"), FAILED)
    journal.close()
    return tmp_path / "step_1.jsonl"


def test_judgments_come_back_failed_ones_too(path):
    journal = Journal(path)
    assert journal.get(("r", 0, "hash")) == VALID
    assert journal.get(("r", 1, "hash")) == FAILED
    assert journal.get(("r", 0, "other")) is None


def test_failed_judgments_are_left_out_for_a_retry(path):
    journal = Journal(path, retry_failed=True)
    assert journal.get(("r", 0, "hash")) == VALID
    assert journal.get(("r", 1, "hash")) is None


@pytest.mark.parametrize("change", [
    {"valid": None, "reason": 3, "id": []}, {"atoms": None}, {"atoms": [1]}, {"atoms": [{}]},
    {"atoms": [{"atom_id": "a", "level": "Q", "evidence_quote": "", "reason": ""}]},
    {"atoms": [{"atom_id": "a", "level": 1, "evidence_quote": "", "reason": ""}]},
])
@pytest.mark.parametrize("retry_failed", [False, True])
def test_a_line_that_is_no_judgment_is_refused_by_name(path, change, retry_failed):
    row = json.loads(path.read_text().splitlines()[0]) | change
    if retry_failed:
        row["valid"] = True
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DamagedFile, match=r"step_1\.jsonl: a line is no judgment; move"):
        Journal(path, retry_failed=retry_failed)


def test_a_row_without_its_fields_is_refused(path):
    path.write_text('{"id": "r"}\n')
    with pytest.raises(DamagedFile, match="no judgment"):
        Journal(path)
