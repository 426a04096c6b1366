import collections
import json
import os

import numpy as np
import pytest

from memcalib_jax.data import RecordError, build_messages, load_records
from memcalib_jax.data.jsonl import read_array
from memcalib_jax.evaluation import rpeval

SMALL = [
    {"question": "周末去哪儿喝茶？", "persona": ["用户喜欢安静的茶馆。", " 用户养了一只猫。"],
     "intent_type": "CA"},
    {"question": "晚饭吃什么？", "persona": ["用户爱吃辣。", "用户不吃香菜。", "用户会弹琴。"],
     "intent_type": "BCA"},
]


@pytest.fixture
def write(tmp_path):
    def to_file(value):
        path = tmp_path / "multi.json"
        path.write_text(value if isinstance(value, str) else
                        json.dumps(value, ensure_ascii=False), encoding="utf-8")
        return path

    return to_file


def test_each_preference_is_a_memory(write):
    first, second = rpeval.load_rpeval(write(SMALL))
    assert (first.id, first.domain, first.question) == ("rpeval-1", "rpeval", "周末去哪儿喝茶？")
    assert [block.fluent_text for block in first.blocks] == ["用户喜欢安静的茶馆。", "用户养了一只猫。"]
    assert [block.atom_ids for block in first.blocks] == [("m1-a1",), ("m2-a1",)]
    assert [(atom.block_id, atom.ideal, atom.rubric) for atom in first.atoms] == [
        ("m1", 2, {}), ("m2", 0, {})]
    assert [atom.ideal for atom in second.atoms] == [1, 2, 0]
    prompt = build_messages(second, representation="fluent")[-1]["content"]
    assert prompt == ("Memories:\n[1] 用户爱吃辣。\n[2] 用户不吃香菜。\n[3] 用户会弹琴。\n\n"
                      "Question:\n晚饭吃什么？")


def changed(**fields):
    return [SMALL[0], SMALL[1] | fields]


@pytest.mark.parametrize("value, said", [
    ("", "not valid JSON"),
    ("[", "not valid JSON"),
    ([], "holds no record"),
    ({}, "must be a JSON array"),
    ([SMALL[0], 3], "[1]: must be an object, not a number"),
    (changed(question=" "), "record 'rpeval-2', field [1].question: must not be empty"),
    (changed(persona="用户爱吃辣。"), "[1].persona: must be a list, not a string"),
    (changed(persona=["a", 1, "c"]), "[1].persona[1]: must be a string"),
    (changed(persona=[]), "[1].persona: must hold at least one preference"),
    (changed(intent_type="BC"), "[1].intent_type: must be one letter of A, B, C for each of the 3"),
    (changed(intent_type="BCD"), "not 'BCD'"),
    (changed(intent_type="support"), "not 'support'"),
    ([{"question": "q", "persona": ["p"]}], "record 'rpeval-1', field [0].intent_type: is missing"),
])
def test_what_is_no_such_file_is_refused(write, value, said):
    path = write(value)
    with pytest.raises(RecordError) as caught:
        rpeval.load_rpeval(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_a_records_file_is_not_taken_for_an_array(tmp_path):
    (tmp_path / "records.jsonl").write_text('{"id": 1}\n{"id": 2}\n')
    with pytest.raises(RecordError, match="not valid JSON"):
        read_array(tmp_path / "records.jsonl")
    with pytest.raises(RecordError, match="no such file"):
        rpeval.load_rpeval(tmp_path / "absent.json")


def test_every_record_of_the_real_file():
    path = os.environ.get("MEMCALIB_RPEVAL")
    if not path:
        pytest.skip("MEMCALIB_RPEVAL does not name RPEval's multi_testset.json")
    records = rpeval.load_rpeval(path)
    raw = json.loads(open(path, encoding="utf-8").read())
    assert len(records) == len(raw) == 150 and len({record.question for record in records}) == 50
    for record, row in zip(records, raw, strict=True):
        assert record.question == row["question"]
        assert [block.fluent_text for block in record.blocks] == row["persona"]
        assert "".join("ABC"[atom.ideal] for atom in record.atoms) == row["intent_type"]
        text = build_messages(record, representation="fluent")[-1]["content"]
        assert all(preference in text for preference in row["persona"])
    levels = collections.Counter(atom.ideal for record in records for atom in record.atoms)
    assert levels == {0: 641, 1: 79, 2: 83}
    with pytest.raises(RecordError):
        load_records(path)


# Three responses. Targets A B C / C C / A; judged A C C / A B / A.
IDEAL = np.array([[0, 1, 2], [2, 2, 9], [0, 9, 9]])
ACTUAL = np.array([[0, 2, 2], [0, 1, 9], [0, 9, 9]])
MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]], bool)


def test_metrics_worked_by_hand():
    # Six preferences: three right, one wrongly at Dominate, one at Ignore, one at Support; one
    # response of three is all right.
    metrics = rpeval.preference_metrics(IDEAL, ACTUAL, MASK)
    assert metrics == pytest.approx({"Macro": 100 / 3, "Micro": 50.0, "OPB": 100 / 6,
                                     "UPB": 100 / 6, "RII": 100 / 6}, abs=1e-12)
    assert list(metrics) == list(rpeval.METRICS)


def test_kinds_of_mismatch():
    """Which error each of the nine (target, judged) pairs is."""
    kinds = {}
    for ideal in range(3):
        for actual in range(3):
            metrics = rpeval.preference_metrics([[ideal]], [[actual]], [[True]])
            kinds[ideal, actual] = [name for name, value in metrics.items() if value]
    right = ["Macro", "Micro"]
    assert kinds == {(0, 0): right, (0, 1): ["RII"], (0, 2): ["OPB"],
                     (1, 0): ["UPB"], (1, 1): right, (1, 2): ["OPB"],
                     (2, 0): ["UPB"], (2, 1): ["RII"], (2, 2): right}


def test_shares_sum_to_a_hundred_and_invalid_rows_do_not_count():
    rng = np.random.default_rng(0)
    ideal, actual = rng.integers(0, 3, (2, 40, 5))
    mask = rng.random((40, 5)) < 0.7
    mask[:, 0] = True
    valid = rng.random(40) < 0.8
    metrics = rpeval.preference_metrics(ideal, actual, mask, valid_N=valid)
    assert sum(metrics[name] for name in ("Micro", "OPB", "UPB", "RII")) == pytest.approx(100)
    kept = rpeval.preference_metrics(ideal[valid], actual[valid], mask[valid])
    assert kept == metrics
    wrong = [(i, j) for i, j in zip(*np.nonzero(mask & valid[:, None]))
             if ideal[i, j] < actual[i, j] == 2]
    assert metrics["OPB"] == pytest.approx(100 * len(wrong) / mask[valid].sum())


def test_summary_and_table():
    two = [np.stack([array, array], axis=1) for array in (IDEAL, ACTUAL, MASK)]
    two[1][1, 1] = [2, 2, 9]  # the second response is right under the second seed
    valid = np.ones((3, 2), bool)
    summary = rpeval.summarize(*two, valid)
    assert [seed["Micro"] for seed in summary["seeds"]] == pytest.approx([50, 500 / 6])
    assert summary["mean"]["Micro"] == pytest.approx(200 / 3)
    assert summary["std"]["Micro"] == pytest.approx((500 / 6 - 50) / 2**0.5)
    assert summary["confusion"] == [[4, 0, 0], [0, 0, 2], [1, 1, 4]]
    text = rpeval.table({"model": "m", "judge": {"model": "j"}, "note": None, "overall": summary})
    assert "66.67 ±23.57" in text
    assert [line.split() for line in text.splitlines()[-3:]] == [
        ["target", "Ignore", "4", "0", "0"], ["target", "Support", "0", "0", "2"],
        ["target", "Dominate", "1", "1", "4"]]
    one = rpeval.summarize(*(array[:, :1] for array in two), valid[:, :1])
    assert one["std"]["Micro"] is None
