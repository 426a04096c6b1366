import math

import numpy as np
import pytest

from memcalib_jax.credit import CHANNELS
from memcalib_jax.evaluation import calibration_metrics
from memcalib_jax.evaluation.metrics import channel_proportions, macro_accuracy, mean_and_std

# Four responses: exact; one step over; two under and one over; three atoms, two steps over each of
# two. O = 0 1 1 4, U = 0 0 2 0.
IDEAL = np.array([[0, 1, 2], [0, 1, 2], [0, 2, 1], [0, 0, 2]])
ACTUAL = np.array([[0, 1, 2], [0, 2, 2], [1, 0, 1], [2, 2, 2]])
MASK = np.ones((4, 3), bool)


def test_metrics_worked_by_hand():
    metrics = calibration_metrics(IDEAL, ACTUAL, MASK)
    assert metrics == {
        "sMOS": 100 * (0 + 1 / 2 + 1 / 2 + 15 / 16) / 4,
        "sMUS": 100 * (3 / 4) / 4,
        "AOR": 75.0,
        "AUR": 25.0,
        "SCS": 100 * (1 + 1 / 2 + 1 / 8 + 1 / 16) / 4,
        "Exact": 25.0,
    }
    assert all(type(value) is float for value in metrics.values())


def test_another_rho():
    metrics = calibration_metrics(IDEAL, ACTUAL, MASK, rho=0.25)
    assert metrics["sMUS"] == 100 * (15 / 16) / 4
    assert metrics["SCS"] == 100 * (1 + 1 / 4 + 1 / 64 + 1 / 256) / 4


def test_over_and_under_use_do_not_cancel():
    metrics = calibration_metrics([[0, 2]], [[1, 1]], np.ones((1, 2), bool))
    assert metrics == {
        "sMOS": 50, "sMUS": 50, "AOR": 100, "AUR": 100, "SCS": 25, "Exact": 0
    }  # fmt: skip


def test_atoms_outside_the_mask_and_invalid_rows_are_left_out():
    ideal = np.column_stack([IDEAL, np.full(4, 9)])
    actual = np.column_stack([ACTUAL, np.full(4, -1)])
    mask = np.column_stack([MASK, np.zeros(4, bool)])
    ideal, actual = np.vstack([ideal, [7] * 4]), np.vstack([actual, [7] * 4])
    mask = np.vstack([mask, [False] * 4])
    valid = np.array([True] * 4 + [False])
    for metric in (calibration_metrics, channel_proportions, macro_accuracy):
        assert metric(ideal, actual, mask, valid_N=valid) == metric(IDEAL, ACTUAL, MASK)


def test_responses_and_atoms_may_be_permuted():
    rng = np.random.default_rng(0)
    ideal, actual = rng.integers(0, 3, (2, 20, 6))
    mask = rng.random((20, 6)) < 0.8
    mask[:, 0] = True
    rows, atoms = rng.permutation(20), rng.permutation(6)
    shuffled = [array[rows][:, atoms] for array in (ideal, actual, mask)]
    assert calibration_metrics(*shuffled) == pytest.approx(calibration_metrics(ideal, actual, mask))
    assert channel_proportions(*shuffled) == channel_proportions(ideal, actual, mask)


def test_channel_proportions():
    # Twelve atoms: A+ 2, AB- 1, AC- 2, B+ 2, BC- 1, CA- 1, C+ 3.
    shares = channel_proportions(IDEAL, ACTUAL, MASK)
    assert tuple(shares) == CHANNELS
    expected = [200 / 12, 100 / 12, 200 / 12, 0, 200 / 12, 100 / 12, 100 / 12, 0, 300 / 12]
    assert list(shares.values()) == pytest.approx(expected, abs=1e-12)


def test_macro_accuracy_counts_each_level_once():
    # Ignore 2 of 5, Bound 2 of 3, Control 3 of 4.
    expected = 100 * (2 / 5 + 2 / 3 + 3 / 4) / 3
    assert macro_accuracy(IDEAL, ACTUAL, MASK) == pytest.approx(expected)
    # A level that does not occur does not count.
    assert macro_accuracy([[0, 0, 2]], [[0, 1, 2]], np.ones((1, 3), bool)) == 75.0


def test_mean_and_std_over_seeds():
    assert mean_and_std([1.0, 2.0, 6.0]) == (3.0, math.sqrt(7))
    assert mean_and_std([4.0]) == (4.0, None)
    with pytest.raises(ValueError, match="at least one value"):
        mean_and_std([])


@pytest.mark.parametrize("metric", [calibration_metrics, channel_proportions, macro_accuracy])
@pytest.mark.parametrize(
    "ideal, actual, mask, valid, message",
    [
        ([[0]], [[0]], [[True]], [False], "none of the 1 responses is valid"),
        (np.zeros((0, 2)), np.zeros((0, 2)), np.zeros((0, 2)), None, "none of the 0 responses"),
        ([[0], [1]], [[0], [1]], [[True], [False]], None, "response 1 is valid but has no atoms"),
        ([[0], [3]], [[0], [0]], [[1], [1]], None, "ideal_N_A: atom 0 of response 1 has .* 3"),
        ([[0, 1]], [[0, -1]], [[1, 1]], None, "actual_N_A: atom 1 of response 0 has level -1"),
        ([[0, 1]], [[0]], [[1, 1]], None, r"actual_N_A must have shape \(1, 2\), got \(1, 1\)"),
        ([0, 1], [0, 1], [1, 1], None, r"atom_mask_N_A must be \[responses, atoms\]"),
        ([[0]], [[0]], [[True]], [True, True], r"valid_N must have shape \(1,\), got \(2,\)"),
    ],
)
def test_bad_judgments_are_refused(metric, ideal, actual, mask, valid, message):
    with pytest.raises(ValueError, match=message):
        metric(ideal, actual, mask, valid_N=valid)


@pytest.mark.parametrize("rho", [0, 1, -0.5, 2])
def test_rho_is_a_decay(rho):
    with pytest.raises(ValueError, match="rho must lie between 0 and 1"):
        calibration_metrics(IDEAL, ACTUAL, MASK, rho=rho)
