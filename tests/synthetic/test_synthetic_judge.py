import asyncio

import pytest

from memcalib_jax.synthetic.judge import ExactJudge, use_levels
from memcalib_jax.synthetic.records import draw_records, value_of
from memcalib_jax.training.judging import judgment_from_json, judgment_to_json


@pytest.mark.parametrize("response, levels", [
    ("sure choose tea cat ; since your red the plum", [2, 2, 1, 1]),
    ("choose soup bread ; since that fresh this quick", [0, 0, 0, 0]),
    # A value in both sections controls, and so does one that supports twice.
    ("choose tea soup ; since your tea the red", [2, 0, 1, 0]),
    ("choose soup bread ; since your red the red", [0, 0, 2, 0]),
    # Twice in the decision is no more than once.
    ("choose tea tea ; since your red the quick", [2, 0, 1, 0]),
    # More items than slots count.
    ("choose tea cat red ; since your plum", [2, 2, 2, 1]),
    ("choose soup bread ; since your tea the cat this red that plum", [1, 1, 1, 1]),
    # Words outside the sections support.
    ("tea choose soup bread ; since that fresh", [1, 0, 0, 0]),
    ("choose soup bread ; since that fresh plum", [0, 0, 0, 1]),
    # Malformed: no section, none ended, the wrong order, the border left out, another decision.
    ("", [0, 0, 0, 0]), ("tea", [1, 0, 0, 0]), ("tea tea", [2, 0, 0, 0]), ("choose", [0, 0, 0, 0]),
    ("choose tea cat", [2, 2, 0, 0]), ("since tea ; choose cat", [1, 2, 0, 0]),
    ("choose tea since cat ; red", [2, 1, 1, 0]),
    ("choose ; tea since cat", [1, 1, 0, 0]),
    ("choose tea ; choose cat ; since red", [2, 1, 1, 0]),
    ("teacup cats chooses tea", [1, 0, 0, 0])])
def test_hand_written_responses(response, levels):
    assert use_levels(["tea", "cat", "red", "plum"], response) == levels


def test_no_word_that_is_added_lowers_a_level():
    texts = ["choose tea soup ; since your red the quick", "choose red ; since tea tea", "red"]
    for text in texts:
        before = use_levels(["tea", "red", "plum"], text)
        for extra in ("tea", "red", "plum", "sure"):
            after = use_levels(["tea", "red", "plum"], f"{text} {extra}")
            assert all(b <= a for b, a in zip(before, after))


def test_it_judges_as_the_endpoints_judge_does():
    record = draw_records(1, seed=0, name="r")[0]
    values = [value_of(atom) for atom in record.atoms]
    text = f"choose {values[1]} soup ; since your {values[0]} the quick"
    judgment = asyncio.run(ExactJudge().judge(record, text, sample_index=3))
    assert judgment.valid and judgment.levels == (1, 2, *[0] * (len(values) - 2))
    assert [detail.atom_id for detail in judgment.details] == [atom.id for atom in record.atoms]
    assert judgment.details[1].evidence_quote == values[1]
    assert judgment_from_json(judgment_to_json(judgment)) == judgment
