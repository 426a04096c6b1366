import numpy as np
import pytest

from memcalib_jax.evaluation.trace import Trace
from memcalib_jax.synthetic.credited import credited, kinds_of, shares
from memcalib_jax.synthetic.figures import learning_picture, watch_picture
from memcalib_jax.synthetic.summary import (
    COLUMNS, Run, by_arm, differences, markdown, paired, steps_to_goal)

WORDS = "sure choose tea oslo ; since your red the quick".split()


def trace():
    """One response with a localized pair of C+ (tea) and one of BA- (golf), both at threshold 0.

    oslo is wrongly used, red rightly, quick is a default.
    """
    text = " ".join(WORDS)
    ends = np.cumsum([len(word) + 1 for word in WORDS]) - 1
    length = len(WORDS) + 1
    atoms = [("drink tea", 2, 2), ("city oslo", 1, 2), ("color red", 1, 1), ("sport golf", 1, 0)]
    nine = np.zeros((1, 9), np.float32)
    fallback = np.ones((1, 9), np.int8)
    fallback[0, [3, 8]] = 0
    # C+ gives 3 of 4 to tea and 1 to the filler; BA- 2 of 8 to red, 1 to oslo, 1 to quick, 4 to
    # the end.
    right, under = np.zeros(length), np.zeros(length)
    right[[2, 0]] = 0.75, 0.25
    under[[7, 3, 9, 10]] = -0.5, -0.25, -0.25, -1.0
    return Trace(
        step=1, settings={"mode": "ordered", "granularity": "token", "max_difference": 3.0,
                          "merge_overuse": False},
        rms=1.0, entropy=0.0, noise=0.0,
        records=[{"id": "r", "question": "dinner", "atoms": [
            {"id": f"a{i}", "text": atom, "ideal": ideal}
            for i, (atom, ideal, _) in enumerate(atoms)]}],
        responses=[{"text": text, "finish_reason": "stop"}],
        record_R=np.zeros(1, np.int32), sample_R=np.zeros(1, np.int32), valid_R=np.ones(1, bool),
        length_R=np.array([length], np.int32),
        actual_R_A=np.array([[level for *_, level in atoms]], np.int8), rewards_R_C=nine,
        channel_advantages_R_C=nine, signal_gate_R_C=nine > -1, direction_gate_R_C=nine > -1,
        fallback_R_C=fallback, thresholds_C=np.zeros(9, np.float32),
        token_N=np.zeros(length, np.int32), token_end_N=np.append(ends, len(text)).astype(np.int32),
        advantage_N=np.zeros(length, np.float32), pair_response_S=np.zeros(2, np.int32),
        pair_channel_S=np.array([3, 8], np.int32),
        difference=np.concatenate([under, right]).astype(np.float32),
        multiplier=np.ones(2 * length, np.float32))


def test_where_credit_went_by_hand():
    assert kinds_of(trace(), 0, 8) == [
        "other", "other", "own", "wrong", "other", "other", "other", "right", "other", "default",
        "stop"]
    found = credited(trace())
    assert found["C+"] == {"pairs": 1, "hits": 1, "own": 0.75, "right": 0, "wrong": 0,
                           "default": 0, "stop": 0, "other": 0.25}
    assert found["BA-"] == {"pairs": 1, "hits": 0, "own": 0, "right": 0.25, "wrong": 0.125,
                            "default": 0.125, "stop": 0.5, "other": 0}
    assert set(found) == {"C+", "BA-"}


def test_shares_count_each_pair_once():
    steps = [{"C+": {"pairs": 3, "own": 2.0}}, {"C+": {"pairs": 1, "own": 1.0},
                                                "B+": {"pairs": 4, "own": 1.0}}, {}]
    assert shares(steps, ("B+", "C+"), "own") == 100 * 4 / 8
    assert np.isnan(shares(steps, ("BA-",), "own"))


def test_the_goal_is_reached_by_a_mean_of_five():
    assert steps_to_goal([60] * 4 + [100, 60, 60]) is None
    assert steps_to_goal([60, 60, 70, 80, 80, 60]) == 5
    assert steps_to_goal([90, 90]) is None


def run(arm, seed, scs, goal):
    figures = dict.fromkeys(COLUMNS) | {"SCS": scs, "steps_to_goal": goal}
    steps = [{"step": step, "rollout/SCS": scs - 6 + step, "rollout/sMOS": 20.0 - step,
              "rollout/sMUS": 40.0 - step, "rollout/length_mean": 12.0, "rollout/stopped": 1.0,
              "loss/kl": 0.1 * step} for step in range(1, 7)]
    start = dict.fromkeys(("SCS", "Exact", "sMOS", "sMUS", "AOR", "AUR"), 30.0 + seed)
    return Run(arm, seed, start, figures, steps)


RUNS = [run("gdpo@0.05", 0, 70.0, 40), run("gdpo@0.05", 1, 74.0, None),
        run("guarded@0.05", 1, 79.0, 25), run("memcalib@0.05", 0, 75.0, 30),
        run("memcalib@0.05", 1, 77.0, 28)]


def test_arms_over_seeds():
    arms = by_arm(RUNS)
    assert arms["gdpo@0.05"]["seeds"] == [0, 1]
    column = arms["gdpo@0.05"]["columns"]["SCS"]
    assert column == {"values": [70, 74], "mean": 72, "std": pytest.approx(8 ** 0.5)}
    assert arms["gdpo@0.05"]["columns"]["steps_to_goal"] == {
        "values": [40, None], "mean": 40, "std": None}
    assert arms["gdpo@0.05"]["columns"]["kl"]["mean"] is None
    # 70 - 75 and 74 - 77.
    assert paired(RUNS, "gdpo@0.05", "memcalib@0.05", "SCS") == {
        "mean": -4, "std": pytest.approx(2 ** 0.5), "count": 2}
    assert paired(RUNS, "gdpo@0.05", "memcalib@0.05", "kl") is None
    assert differences(RUNS)["guarded@0.05"]["SCS"] == {"mean": 2, "std": None, "count": 1}
    assert differences([*RUNS, run("memcalib@0.01", 0, 1.0, None)]) == {}


def test_the_table():
    lines = markdown(RUNS).splitlines()
    assert lines[0] == "| | cold start | gdpo@0.05 | guarded@0.05 | memcalib@0.05 |"
    assert lines[2:4] == ["| seeds | 2 | 2 | 1 | 2 |",
                          "| SCS % | 30.5 ± 0.7 | 72.0 ± 2.8 | 79.0 | 76.0 ± 1.4 |"]
    assert "| steps to SCS 70 |  | 40.0 (1 of 2) | 25.0 | 29.0 ± 1.4 |" in lines
    assert "| SCS % | -4.0 ± 1.4 (2) | +2.0 (1) |" in lines
    assert not any(line.startswith("| KL nats") for line in lines)


@pytest.mark.parametrize("picture", [learning_picture, watch_picture])
def test_pictures_are_drawn(picture):
    data = picture(RUNS)
    assert data.startswith(b"\x89PNG") and len(data) > 20_000
    assert picture(RUNS[:2]) != data
