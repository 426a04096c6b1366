import json

import pytest

from memcalib_jax.construction import sample_paths
from memcalib_jax.construction.admission import Admission
from memcalib_jax.construction.screening import ScreeningLimits
from memcalib_jax.construction.sources import SourceFile
from memcalib_jax.jsonlines import DamagedFile


@pytest.fixture
def files(tmp_path):
    """The sample's good rows as three files of eight."""
    path, _ = sample_paths()
    lines = open(path, "rb").readlines()
    made = []
    for number in range(3):
        part = tmp_path / f"{number}.jsonl"
        part.write_bytes(b"".join(lines[8 * number:8 * number + 8]))
        made.append(SourceFile(str(part)))
    return made


def admit(folder, files, hashes, **bounds):
    return Admission.open(folder, files, hashes, None, ScreeningLimits(), **bounds)


def ids(admission):
    return [sample["id"] for sample in admission.samples()]


def test_what_was_screened_is_not_screened_again(tmp_path, files):
    first = admit(tmp_path / "run", files[:1], ["a"])
    (tmp_path / "0.jsonl").unlink()
    again = admit(tmp_path / "run", files[:1], ["a"])
    assert ids(again) == ids(first) and again.total == len(ids(first)) == 8
    assert again.by_domain == {"health_seed": 8} and again.refused == {}


def test_files_may_come_behind(tmp_path, files):
    before = ids(admit(tmp_path / "run", files[:2], ["a", "b"]))
    after = ids(admit(tmp_path / "run", files, ["a", "b", "c"]))
    assert after[:16] == before and len(after) == 24


@pytest.mark.parametrize("hashes", [["a"], ["b", "a"], ["a", "x"], ["c", "a", "b"]])
def test_other_files_are_refused(tmp_path, files, hashes):
    admit(tmp_path / "run", files[:2], ["a", "b"])
    with pytest.raises(DamagedFile, match="admission.json is of other sources"):
        admit(tmp_path / "run", files, hashes)


def test_a_screening_that_was_cut_off_begins_anew(tmp_path, files):
    admit(tmp_path / "run", files[:2], ["a", "b"])
    (tmp_path / "2.jsonl").unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        admit(tmp_path / "run", files, ["a", "b", "c"])
    assert len(ids(admit(tmp_path / "run", files[:2], ["a", "b"]))) == 16


def test_no_more_of_a_domain_than_wanted(tmp_path, files):
    admission = admit(tmp_path / "run", files, list("abc"), max_per_domain=3)
    assert admission.by_domain == {"health_seed": 3, "general": 3, "coding": 3}


@pytest.mark.parametrize("name, content", [
    ("admission.json", b"{"), ("admission.json", b"[]"), ("admission.json", b'{"by_domain": {}}'),
    ("admission.json", b'{"by_domain": 3, "refused": {}, "sources": []}'),
    ("admitted.jsonl", b""), ("admitted.jsonl", b'{"id": "sample'), ("admitted.jsonl", None)])
def test_damage_is_named_with_what_to_do(tmp_path, files, name, content):
    folder = tmp_path / "run"
    admit(folder, files[:1], ["a"])
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(DamagedFile, match=f"{name} is damaged; remove .*admission.json"):
        ids(admit(folder, files[:1], ["a"]))
    (folder / "admission.json").unlink()
    assert len(ids(admit(folder, files[:1], ["a"]))) == 8


def test_refused_rows_are_told_with_place_and_reason(tmp_path):
    _, bad = sample_paths()
    admit(tmp_path / "run", [SourceFile(bad)], ["a"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "refused.jsonl").open()]
    assert {"place": "source_bad.jsonl:3", "id": "sample-bad-03", "reason": "too_short",
            "detail": "context and question: 5 words, of 20 at least"} in rows
