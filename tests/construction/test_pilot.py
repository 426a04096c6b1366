import csv
import io

import pytest

from memcalib_jax.construction.pilot import (
    fresh_order, is_filled, quotas, read_sheet, review_page, review_sheet)

RUBRIC = {"expected_answer_behavior": "e", "correct_use": "c", "under_use": "u", "over_use": "o",
          "observable_checks": ["one", "two"]}


def sample(name, text="The user <b>bakes</b>."):
    return {"id": name, "domain": "general", "query": "=SUM(1)", "context": "c", "question": "q",
            "reference_answer": "r", "passages": [{"text": "p"}],
            "blocks": [{"id": "m1", "text": "Fluent.", "atom_ids": ["m1_a1"]}],
            "atoms": [{"text": text, "level": "B", "action": "apply", "origin": "source",
                       "rubric": RUBRIC}]}


SAMPLES = [sample(f"s{number}") for number in range(10)]


def filled(*answers):
    """Fills the sheet's rows in: (passes, stage, issue) each, then "yes" to the end."""
    rows = list(csv.reader(io.StringIO(review_sheet(SAMPLES))))
    for row, answer in zip(rows[1:], [*answers, *[("yes", "", "")] * 10]):
        row[3:6] = answer
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def test_fifty_are_balanced_over_the_domains():
    assert quotas(50) == {"health_seed": 17, "general": 17, "coding": 16}
    assert quotas(9) == {"health_seed": 3, "general": 3, "coding": 3}
    assert quotas(4) == {"health_seed": 2, "general": 1, "coding": 1}


def test_batches_are_drawn_by_the_seed():
    ids = [f"i{number}" for number in range(40)]
    assert fresh_order(ids, 0) == fresh_order(ids[::-1], 0) != fresh_order(ids, 1)
    assert sorted(fresh_order(ids, 0)) == sorted(ids)


def test_a_sheet_is_no_formula_and_comes_empty():
    text = review_sheet(SAMPLES)
    assert "'=SUM(1)" in text and not is_filled(text)
    assert is_filled(filled())


def test_nine_of_ten_are_enough():
    outcome = read_sheet(filled(("no", "Derivation", "the query names the race")), SAMPLES)
    assert (outcome.passed, outcome.total, outcome.pass_rate) == (9, 10, 0.9)
    assert outcome.issues == (("s0", "derivation", "the query names the race"),)
    outcome = read_sheet(filled(("n", "annotation", ""), ("No", "derivation", ""),
                                ("no", "annotation", "")), SAMPLES)
    assert outcome.pass_rate == 0.7
    assert outcome.by_stage == {"annotation": 2, "derivation": 1}


@pytest.mark.parametrize("answers, message", [
    ([("maybe", "", "")], "none of yes, no: 1"),
    ([("", "", "")], "1 rows without a verdict: 1$"),
    ([("no", "", "bad")], "do not pass and name no stage"),
    ([("no", "tuning", "bad")], "do not pass and name no stage"),
])
def test_sheets_that_will_not_do(answers, message):
    with pytest.raises(ValueError, match=message):
        read_sheet(filled(*answers), SAMPLES)


def test_the_page_shows_all_and_runs_nothing():
    page = review_page(SAMPLES[:2], "Pilot <1>")
    assert "Pilot &lt;1&gt;" in page and "The user &lt;b&gt;bakes&lt;/b&gt;." in page
    assert "<b>bakes" not in page and "<script" not in page
    for text in ("Fluent.", "one; two", "=SUM(1)", "observable checks"):
        assert text in page
