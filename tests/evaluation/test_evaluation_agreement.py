import numpy as np
import pytest

from memcalib_jax.evaluation.agreement import accuracy, cohen_kappa, confusion


def test_confusion_rows_are_the_reference():
    counts = confusion([0, 0, 1, 2, 2, 2], [0, 1, 1, 0, 2, 2], 3)
    assert counts.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 2]]


def test_kappa_by_hand():
    # 50 items: 20 + 15 agree, so observed .7; expected .5 * .6 + .5 * .4 = .5.
    counts = [[20, 5], [10, 15]]
    assert accuracy(counts) == pytest.approx(0.7, abs=1e-12)
    assert cohen_kappa(counts) == pytest.approx(0.4, abs=1e-12)


@pytest.mark.parametrize(
    "counts, kappa",
    [
        ([[5, 0], [0, 7]], 1.0),
        ([[0, 5], [5, 0]], -1.0),
        ([[4, 4], [4, 4]], 0.0),
        ([[9, 0], [0, 0]], 1.0),
        ([[6, 0], [4, 0]], 0.0),
    ],
)
def test_kappa_ends(counts, kappa):
    assert cohen_kappa(counts) == pytest.approx(kappa, abs=1e-12)


def test_kappa_against_pairs_counted_one_by_one():
    rng = np.random.default_rng(7)
    first = rng.integers(0, 3, 200)
    second = np.where(rng.random(200) < 0.6, first, rng.integers(0, 3, 200))
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / 200
    # Chance: every item of the one against every item of the other.
    chance = sum(a == b for a in first for b in second) / 200**2
    kappa = cohen_kappa(confusion(first, second, 3))
    assert kappa == pytest.approx((observed - chance) / (1 - chance), abs=1e-12)


def test_kappa_ignores_names_of_labels():
    rng = np.random.default_rng(8)
    first, second = rng.integers(0, 3, (2, 100))
    renamed = np.array([2, 0, 1])
    assert cohen_kappa(confusion(renamed[first], renamed[second], 3)) == pytest.approx(
        cohen_kappa(confusion(first, second, 3)), abs=1e-12
    )


@pytest.mark.parametrize(
    "first, second, said",
    [
        ([], [], "at least one"),
        ([0, 1], [0], "shapes"),
        ([[0]], [[0]], "shapes"),
        ([0, 3], [0, 1], "from 0 to 2"),
        ([0, 1], [-1, 1], "from 0 to 2"),
        ([0.5, 1.0], [0, 1], "whole numbers"),
    ],
)
def test_bad_labels(first, second, said):
    with pytest.raises(ValueError, match=said):
        confusion(first, second, 3)
