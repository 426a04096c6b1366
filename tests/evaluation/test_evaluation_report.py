import json

import numpy as np
import pytest

from memcalib_jax.evaluation import report
from memcalib_jax.evaluation.summary import summarize


def make_results(actual, *, judge="some-judge", checkpoint=None, domains=("coding", "general"),
                 **settings):
    """Results of two records with atoms A and C each, judged as `actual` [N, S, 2] says."""
    actual = np.asarray(actual)
    records, seeds, _ = actual.shape
    ideal = np.broadcast_to(np.array([0, 2]), actual.shape)
    valid = np.ones((records, seeds), bool)
    return {
        "format": report.FORMAT, "note": report.judge_note(judge), "model": "/models/Some-1B",
        "checkpoint": checkpoint, "judge": {"model": judge, "statistics": {}},
        "records": {"in_file": 3, "too_long": 1, "answered": 2},
        "seeds": [{"seed": k, "responses": records + 1, "valid": records,
                   "invalid": {"network": 1}, "cut_at_limit": 0, "tokens_mean": 5.0}
                  for k in range(seeds)],
        **summarize(ideal, actual, np.ones(actual.shape, bool), valid, domains),
        "settings": {"num_seeds": seeds, "temperature": 1.0} | settings}


GOOD = [[[0, 2], [0, 2]], [[0, 2], [0, 1]]]  # only an under-use of one step, in seed 1
POOR = [[[1, 2], [1, 2]], [[0, 0], [0, 0]]]  # one step over, and two under, in both seeds


def line(text, start):
    return next(row for row in text.splitlines() if row.startswith(start)).split()


def test_table_shows_means_and_deviations():
    text = report.table(make_results(GOOD))
    # SCS: seed 0 100, seed 1 (100 + 50) / 2 = 75: mean 87.5, deviation 25 / sqrt(2).
    assert line(text, "all")[1:3] == ["87.50", "±17.68"]
    assert line(text, "coding")[1:3] == ["100.00", "±0.00"]
    assert line(text, "ideal Control")[2:] == ["0.00", "25.00", "75.00", "4"]
    assert line(text, "ideal Bound")[2:] == ["-", "-", "-", "0"]
    assert "2 records (1 skipped as too long), 2 seeds: 6 responses, 4 judged, 2 invalid" in text
    assert "2 invalid: network" in text
    assert "Some-1B, judged by some-judge" in text


def test_table_of_one_seed_has_no_deviations():
    text = report.table(make_results([[[0, 2]], [[0, 1]]]))
    assert line(text, "all")[1:] == ["75.00", "50.00", "0.00", "25.00", "0.00", "50.00"]


@pytest.mark.parametrize("judge, real", [("lexical-stand-in", False), ("some-judge", True)])
def test_figures_of_the_stand_in_say_that_they_are_none(judge, real):
    results = make_results(GOOD, judge=judge)
    other = make_results(GOOD)
    assert (results["note"] is None) == real
    for text in (report.table(results), report.compare(results, other),
                 report.compare(other, results)):
        assert ("NO REAL JUDGMENTS" in text) != real


def test_no_line_is_wider_than_100_columns():
    wide = make_results(POOR, judge="lexical-stand-in", domains=["a" * 40, "general"])
    for text in (report.table(wide), report.compare(wide, make_results(GOOD))):
        assert max(map(len, text.splitlines())) <= 100


def test_compare_tells_better_from_worse():
    before, after = make_results(POOR), make_results(GOOD, checkpoint={"run": "a/b", "step": 7})
    text = report.compare(before, after)
    # SCS: POOR has (50 + 25) / 2 = 37.5 in both seeds; AOR half of the responses.
    assert line(text, "SCS") == [
        "SCS", "higher", "37.50", "±0.00", "87.50", "±17.68", "+50.00", "better"]
    assert line(text, "AOR") == [
        "AOR", "lower", "50.00", "±0.00", "0.00", "±0.00", "-50.00", "better"]
    assert line(report.compare(after, before), "AOR")[-2:] == ["+50.00", "worse"]
    assert line(text, "CB-")[-2:] == ["+25.00", "worse"]
    assert line(text, "B+")[-1] == "-"
    assert "after:  Some-1B, step 7 of b" in text


def test_compare_does_not_call_noise_a_change():
    steady, spread = make_results(GOOD), make_results([[[0, 2], [0, 2]], [[0, 2], [0, 0]]])
    # SCS 87.5 ±17.68 and 81.25 ±26.52: a difference of 6.25.
    assert "within the spread over seeds" in " ".join(line(report.compare(steady, spread), "SCS"))
    assert line(report.compare(steady, steady), "SCS")[-1] == "same"


def test_compare_says_what_differs_besides_the_model():
    before = make_results(GOOD, prompts_sha256="a")
    after = make_results(GOOD, judge="other-judge", prompts_sha256="b", temperature=0.5)
    text = report.compare(before, after)
    assert "Not like for like: the judges differ" in text
    assert "Not like for like: the prompts differ" in text
    assert "Not like for like: the temperature differs (1.0 before, 0.5 after)" in text
    assert "Not like for like" not in report.compare(before, before)


@pytest.mark.parametrize("content, message", [
    (None, "cannot be read"), ("{", "no results"), ("[]", "no results"), ("{}", "no results"),
    ('{"format": "something else"}', "no results")])
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        report.load_results(path)
    assert str(path) in str(error.value)


def test_results_are_found_by_file_or_folder(tmp_path):
    results = make_results(GOOD)
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert report.load_results(tmp_path) == results
    assert report.load_results(tmp_path / "results.json") == results


@pytest.mark.parametrize("seeds", [1, 2])
def test_picture_is_a_readable_size(seeds):
    import io

    import matplotlib.image

    results = make_results(np.asarray(GOOD)[:, :seeds], judge="lexical-stand-in")
    pixels = matplotlib.image.imread(io.BytesIO(report.picture(results)))
    assert pixels.shape[:2] == (780, 1800)
    # The red of the note on the stand-in, on white, is nowhere in a picture without it.
    plain = matplotlib.image.imread(io.BytesIO(report.picture(
        make_results(np.asarray(GOOD)[:, :seeds]))))
    red = np.array([0xb0, 0x00, 0x20]) / 255
    found = [np.isclose(image[..., :3], red, atol=0.01).all(-1).any() for image in (pixels, plain)]
    assert found == [True, False]
