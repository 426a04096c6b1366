"""Memory results over seeds, their tables and pictures."""

import json

import pytest

from memcalib_jax.evaluation import memory_figures
from memcalib_jax.evaluation.memory_report import (
    FORMAT, cell, comparison_tables, load_memory_results, over_seeds, results_table)


def metrics(f1, judge=None):
    return {"questions": 4, "failed": 0, "f1": f1, "bleu_1": f1 / 2, "judge": judge,
            "m_fail": 25.0, "retrieval_failure": 0.0}


def seed(f1, **more):
    return {"summary": {"all": metrics(f1), "category": {"temporal": metrics(f1 + 1)},
                        "stage": {"1-8": metrics(f1)},
                        "session": {"2": metrics(f1), "10": metrics(f1 + 3)}},
            "growth": {"2": {"entries": 3.0, "words": 9.0}, "10": {"entries": 5.0, "words": 20.0}},
            "tokens": {"per_conversation": 100.0, "per_reply": 10.0, "p50": 9.0, "p90": 12.0,
                       "p99": 15.0, "longest": 16.0}, "seconds": 2.0} | more


def results(*seeds, sha="same"):
    return {"format": FORMAT, "questions_sha256": sha, **over_seeds(seeds)}


def test_mean_and_deviation_of_every_number():
    combined = over_seeds([{"a": 1.0, "b": {"c": 2.0, "d": None}, "e": None},
                           {"a": 3.0, "b": {"c": 2.0, "d": 5.0}, "e": None, "f": 7.0}])
    assert combined == {"a": {"mean": 2.0, "std": pytest.approx(2**0.5)},
                        "b": {"c": {"mean": 2.0, "std": 0.0}, "d": {"mean": 5.0, "std": None}},
                        "e": None, "f": {"mean": 7.0, "std": None}}


def test_cells():
    assert cell({"mean": 12.3, "std": None}) == "12.30"
    assert cell({"mean": 12.0, "std": 0.5}, 1) == "12.0 ± 0.5"
    assert cell(None) == "-"


def test_one_evaluations_table():
    lines = results_table(results(seed(10.0), seed(14.0))).splitlines()
    assert lines[0] == "| questions | number | F1 | BLEU-1 | Judge | M-Fail | Retrieval failure |"
    assert lines[2] == "| all | 4 | 12.00 ± 2.83 | 6.00 ± 1.41 | - | 25.00 ± 0.00 | 0.00 ± 0.00 |"
    assert [line.split(" | ")[0] for line in lines[3:]] == ["| temporal", "| stage 1-8"]


def test_comparisons_and_what_cannot_be_compared():
    runs = {"a": results(seed(10.0)), "b": results(seed(20.0, tokens=None, seconds=None,
                                                       growth={}))}
    text = comparison_tables(runs)
    assert "| a | 10.00 | 5.00 | - | 25.00 | 0.00 | 5.0 | 2.0 | 100 |" in text
    assert "| b | 20.00 | 10.00 | - | 25.00 | 0.00 | - | - | - |" in text
    assert "| method | 2 | 10 |\n| --- | --- | --- |\n| a | 10.00 | 13.00 |" in text
    with pytest.raises(ValueError, match="c and a asked different questions"):
        comparison_tables(runs | {"c": results(seed(1.0), sha="other")})


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": "other"}'])
def test_other_files_are_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match="results.json (cannot be read|holds no results)"):
        load_memory_results(tmp_path)


def test_results_are_read_back(tmp_path):
    value = results(seed(1.0))
    (tmp_path / "results.json").write_text(json.dumps(value))
    assert load_memory_results(tmp_path) == value


def test_training_steps_count_over_stages():
    stages = [[{"step": 1, "eval/f1": 0.1}, {"step": 2}], [{"step": 1, "eval/f1": 0.3}]]
    assert memory_figures._series(stages, "eval/f1") == ([1, 3], [0.1, 0.3], [2, 3])


def test_pictures_are_pngs_whatever_is_missing():
    runs = {"a": results(seed(10.0), seed(12.0)),
            "b": results(seed(20.0, tokens=None, seconds=None))}
    stages = [[{"step": 1, "eval/f1": 0.1, "eval/failure": 0.5, "memory/entries": 3.0}]]
    for picture in (memory_figures.scores_picture(runs), memory_figures.cost_picture(runs),
                    memory_figures.training_picture({"t": stages}, runs),
                    memory_figures.training_picture({"t": stages}, {}),
                    memory_figures.sweep_picture({0.1: runs["a"], 0.3: runs["b"]})):
        assert picture.startswith(b"\x89PNG") and len(picture) > 5000
