import collections
import csv
import io

import numpy as np
import pytest

from memcalib_jax.data import Atom, Block, Record
from memcalib_jax.evaluation import audit
from memcalib_jax.evaluation.agreement import reader_agreement

COUNTS = [[500, 30, 40], [20, 60, 5], [30, 20, 95]]
LEVEL = audit.HUMAN_COLUMN


def pairs_of(counts):
    """`counts[ideal][judged]` pairs of each combination."""
    return [audit.Pair(0, f"r{ideal}{judged}{number}", "a", ideal, judged)
            for ideal, row in enumerate(counts) for judged, count in enumerate(row)
            for number in range(count)]


@pytest.mark.parametrize("sizes, total, counts", [
    ([9, 9, 9], 6, [2, 2, 2]), ([9, 9, 9], 8, [3, 3, 2]), ([1, 9, 0], 6, [1, 5, 0]),
    ([2, 3, 4], 9, [2, 3, 4]), ([5, 5], 0, [0, 0])])
def test_allocation_is_as_even_as_sizes_allow(sizes, total, counts):
    assert audit.allocate(sizes, total) == counts


def test_allocation_of_too_much():
    with pytest.raises(ValueError, match="more than"):
        audit.allocate([1, 2], 4)


def test_the_draw():
    pairs = pairs_of(COUNTS)
    chosen = audit.draw_audit(pairs, 150, 150, seed=0)
    subsets = collections.Counter(subset for subset, _ in chosen)
    assert subsets == {"random": 150, "stratified": 150}
    assert len({pair for _, pair in chosen}) == 300
    strata = collections.Counter((pair.ideal, pair.judged) for subset, pair in chosen
                                 if subset == "stratified")
    # A combination with fewer than the others, but for one more, has given all that it had.
    drawn = collections.Counter((pair.ideal, pair.judged) for _, pair in chosen)
    for ideal, row in enumerate(COUNTS):
        for judged, count in enumerate(row):
            if strata[ideal, judged] < max(strata.values()) - 1:
                assert drawn[ideal, judged] == count
    assert 17 <= max(strata.values()) <= 21 and strata[1, 2] <= 5
    # The random part follows the natural shares.
    natural = sum(pair.ideal == pair.judged == 0 for subset, pair in chosen if subset == "random")
    assert 75 <= natural <= 112
    assert {subset for subset, _ in chosen[:20]} == {"random", "stratified"}
    assert audit.draw_audit(pairs, 150, 150, seed=0) == chosen
    assert audit.draw_audit(pairs, 150, 150, seed=1) != chosen
    with pytest.raises(ValueError, match="150 random and 700 stratified .* the 800"):
        audit.draw_audit(pairs, 150, 700, seed=0)


RECORD = Record(
    "r", "general", "=What, \"now\"?",
    (Block("m1", "Peanuts are out; a nephew plays.", "x", ("a1", "a2")),
     Block("m2", "They like a crunch.", "y", ("a3",))),
    (Atom("a1", "m1", "Peanut allergy.", 2, "apply", {"over_use": "x", "checks": ["u", "v"]}),
     Atom("a2", "m1", "Trombone.", 0, "ignore", {}), Atom("a3", "m2", "Crunch.", 1, "apply", {})))
CHOSEN = [("stratified", audit.Pair(1, "r", "a1", 2, 1)),
          ("random", audit.Pair(0, "r", "a2", 0, 2)), ("random", audit.Pair(0, "r", "a3", 1, 1))]
TEXTS = {(0, "r"): "- Apples,\n- pears", (1, "r"): "Nüsse, \"nein\"."}


def written():
    return audit.sheet_and_key(CHOSEN, {"r": RECORD}, TEXTS)


def filled(levels):
    """The sheet with levels by row number, as a spreadsheet would save it."""
    sheet = list(csv.DictReader(io.StringIO(written()[0])))
    for line, level in zip(sheet, levels):
        line[LEVEL] = level
    return to_csv(sheet)


def to_csv(lines):
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0].keys())
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def test_the_annotator_sees_what_the_judge_saw_but_no_level():
    sheet, key = (list(csv.DictReader(io.StringIO(text))) for text in written())
    assert list(sheet[0]) == ["row", LEVEL, "atom", "question", "memories", "response", "rubric"]
    assert sheet[0] == {
        "row": "1", LEVEL: "", "atom": "Peanut allergy.", "question": "'=What, \"now\"?",
        "memories": "[1] Peanuts are out; a nephew plays.\n[2] They like a crunch.",
        "response": "Nüsse, \"nein\".", "rubric": "over_use: x\nchecks: u; v"}
    # A list would be a formula to a spreadsheet.
    assert sheet[1]["response"] == "'- Apples,\n- pears"
    assert [(line["row"], line["subset"], line["seed"], line["atom_id"], line["ideal"],
             line["judged"]) for line in key] == [
        ("1", "stratified", "1", "a1", "C", "B"), ("2", "random", "0", "a2", "A", "C"),
        ("3", "random", "0", "a3", "B", "B")]


def test_back_from_the_sheet():
    levels = audit.read_audit("\ufeff" + filled(["c", " Bound ", "B"]), written()[1])
    assert levels == {"random": ([1, 1], [2, 1]), "stratified": ([2], [1])}
    # The order of the sheet's rows is nobody's business.
    lines = list(csv.DictReader(io.StringIO(filled(["C", "A", "B"]))))
    assert audit.read_audit(to_csv(lines[::-1]), written()[1]) == {
        "random": ([0, 1], [2, 1]), "stratified": ([2], [1])}
    # A spreadsheet's empty lines.
    assert audit.read_audit(filled(["C", "A", "B"]) + ",,,,,,\r\n", written()[1])


def edited(change):
    lines = list(csv.DictReader(io.StringIO(filled("CAB"))))
    change(lines)
    return to_csv(lines)


@pytest.mark.parametrize("sheet, said", [
    (filled(["C", "", ""]), "2 rows without a level: 2, 3"),
    (filled(["C", "D", "B"]), "1 rows with a level that is none of A, B, C: 2"),
    (edited(lambda lines: lines.pop(1)), "1 rows missing: 2"),
    (edited(lambda lines: lines.append(dict(lines[0]))), "row 1 twice"),
    (edited(lambda lines: lines[0].update(row="17")), "1 rows that the key does not have: 17"),
    (filled("CAB").replace(",", ";"), "no column 'row'; save it as CSV"),
    ("", "no column 'row'"),
])
def test_a_sheet_that_is_not_whole_is_refused(sheet, said):
    with pytest.raises(ValueError, match=said):
        audit.read_audit(sheet, written()[1])


def test_a_changed_key_is_refused():
    sheet, key = filled("CAB"), written()[1]
    with pytest.raises(ValueError, match="row 2 of the key has been changed"):
        audit.read_audit(sheet, key.replace("random,0,r,a2,A,C", "random,0,r,a2,A,X"))


def test_table_and_picture():
    human = np.array([0] * 6 + [1] * 3 + [2])
    judge = np.array([0] * 6 + [1, 1, 2] + [2])
    results = {"random": reader_agreement(human, judge, 3),
               "stratified": reader_agreement([0, 1], [0, 0], 3)}
    text = audit.table(results)
    assert "random: 9 of 10 agree, 90.0% (95% Wilson interval 59.6 to 98.2), kappa 0.821" in text
    assert "the judge is lower in 0, higher in 1" in text
    assert "2 (66.7%)" in text and max(map(len, text.splitlines())) <= 130
    assert audit.picture(results).startswith(b"\x89PNG")
    assert audit.picture({"random": results["random"]}).startswith(b"\x89PNG")
