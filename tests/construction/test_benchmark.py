import json

import pytest

from memcalib_jax.construction.benchmark import (
    composition_rows, has_mixed_block, lines_of, structure_rows, without_near_identical)
from memcalib_jax.construction.freezing import CODE, differences, pipeline_hash, pipeline_parts
from memcalib_jax.data import Atom, Block, Record


def record(domain, *blocks):
    """Makes a record of blocks given by their levels, such as "AB"."""
    atoms, made = [], []
    for number, levels in enumerate(blocks):
        ids = [f"m{number}_a{place}" for place in range(len(levels))]
        atoms += [Atom(id, f"m{number}", id, "ABC".index(level), "apply", {})
                  for id, level in zip(ids, levels)]
        made.append(Block(f"m{number}", "f", " ".join(ids), tuple(ids)))
    return Record(f"{domain}-{blocks}", domain, "q", tuple(made), tuple(atoms))


RECORDS = [record("coding", "AAB", "A"), record("coding", "CC", "BBBB"), record("general", "AC")]


def test_table_6_counts_examples_blocks_and_atoms():
    assert composition_rows(RECORDS) == [["coding", "2", "4", "10"], ["general", "1", "1", "2"],
                                         ["all", "3", "5", "12"]]


def test_table_7_measures_levels_and_blocks():
    # coding: 3 A, 5 B, 2 C of 10; one of two records has a block of two levels.
    assert structure_rows(RECORDS) == [
        ["coding", "30.0%", "50.0%", "20.0%", "50.0%", "1-4", "4-6"],
        ["general", "50.0%", "0.0%", "50.0%", "100.0%", "2-2", "2-2"],
        ["all", "33.3%", "41.7%", "25.0%", "66.7%", "1-4", "2-6"]]
    assert [has_mixed_block(one) for one in RECORDS] == [True, False, True]


def test_of_near_identical_queries_the_first_stays():
    questions = ["How do I plan my next week of runs?", "Which bread keeps longest in summer?",
                 "how do I plan my next WEEK of runs", "Something else altogether, please?"]
    rows = [{"id": str(place), "question": text} for place, text in enumerate(questions)]
    stays, left_out = without_near_identical(rows, 0.9)
    assert [row["id"] for row in stays] == ["0", "1", "3"] and left_out == [("2", "0")]


def test_lines_hold_any_text():
    [line] = lines_of([{"text": "ü\u2028\n"}])
    assert line.count(b"\n") == 1 and json.loads(line) == {"text": "ü\u2028\n"}


PROMPTS = {"screen": "Read.", "derive": "Split."}


def test_every_part_decides_the_hash():
    parts = pipeline_parts(PROMPTS, {"models": ["a"]})
    assert set(parts) == {"prompt/screen", "prompt/derive", "setting/models",
                          *(f"code/{name}" for name in CODE)}
    assert pipeline_hash(parts) == pipeline_hash(pipeline_parts(dict(PROMPTS), {"models": ["a"]}))
    for other in (pipeline_parts(PROMPTS | {"derive": "Split!"}, {"models": ["a"]}),
                  pipeline_parts(PROMPTS, {"models": ["b"]})):
        assert pipeline_hash(other) != pipeline_hash(parts)
    changed = pipeline_parts(PROMPTS | {"derive": "Split!"}, {"models": ["a"], "seed": 1})
    assert differences(parts, changed) == ["prompt/derive", "setting/seed"]


@pytest.mark.parametrize("name", CODE)
def test_the_code_of_the_stages_is_among_the_parts(name):
    from importlib import resources

    assert (resources.files("memcalib_jax.construction") / f"{name}.py").is_file()
