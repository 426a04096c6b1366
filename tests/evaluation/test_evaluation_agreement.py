import numpy as np
import pytest

from memcalib_jax.evaluation.agreement import (
    accuracy,
    cohen_kappa,
    confusion,
    pearson,
    reader_agreement,
    spearman,
    wilson_interval,
)


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


@pytest.mark.parametrize(
    "agreed, total, low, high", [(145, 150, 92.4, 98.6), (111, 150, 66.4, 80.4)])
def test_wilson_interval_of_the_paper(agreed, total, low, high):
    # Section 2.4 and appendix C of arXiv 2609.24259.
    interval = wilson_interval(agreed, total)
    assert [round(100 * bound, 1) for bound in interval] == [low, high]


def test_wilson_interval_solves_its_equation():
    # The bounds are where |share - p| = z sqrt(p (1 - p) / n).
    for agreed, total, confidence, z in ((3, 10, 0.95, 1.959964), (7, 9, 0.9, 1.644854)):
        for bound in wilson_interval(agreed, total, confidence=confidence):
            distance = abs(agreed / total - bound)
            assert distance == pytest.approx(z * (bound * (1 - bound) / total) ** 0.5, abs=1e-6)
    assert wilson_interval(0, 5)[0] == 0.0 and wilson_interval(5, 5)[1] == 1.0
    # z^2 / (n + z^2) is the upper bound without a success.
    assert wilson_interval(0, 5)[1] == pytest.approx(3.8414588 / 8.8414588, abs=1e-6)


@pytest.mark.parametrize("agreed, total, confidence", [(-1, 5, 0.95), (6, 5, 0.95), (0, 0, 0.95),
                                                       (1, 2, 1.0), (1, 2, 0.0)])
def test_no_interval(agreed, total, confidence):
    with pytest.raises(ValueError, match="no interval"):
        wilson_interval(agreed, total, confidence=confidence)


def test_reader_agreement_by_hand():
    # The paper's natural subset: 127 Ignore all agree, three at the Bound/Control boundary, the
    # judge lower in four of five.
    human = [0] * 127 + [1] * 12 + [2] * 11
    judge = [0] * 127 + [1] * 10 + [2] + [0] + [2] * 8 + [1, 1, 0]
    found = reader_agreement(human, judge, 3)
    assert found["confusion"] == [[127, 0, 0], [1, 10, 1], [1, 2, 8]]
    assert (found["total"], found["agreed"], found["lower"], found["higher"]) == (150, 145, 4, 1)
    assert found["agreement"] == pytest.approx(100 * 145 / 150)
    assert [round(bound, 1) for bound in found["interval"]] == [92.4, 98.6]
    assert found["row_percent"][2] == pytest.approx([100 / 11, 200 / 11, 800 / 11])
    expected = (127 * 129 + 12 * 12 + 11 * 9) / 150**2
    assert found["kappa"] == pytest.approx((145 / 150 - expected) / (1 - expected))


def test_an_empty_row_has_no_percent():
    assert reader_agreement([0, 2], [1, 2], 3)["row_percent"] == [
        [0, 100, 0], [None, None, None], [0, 0, 100]]


def test_correlations_by_hand():
    # Deviations -1 0 1 and -1 2 -1, then -1 0 1 and -1.5 -.5 2.
    assert pearson([1, 2, 3], [0, 3, 0]) == pytest.approx(0.0)
    assert pearson([1, 2, 3], [1, 2, 4.5]) == pytest.approx(3.5 / (2 * 6.5) ** 0.5)
    # Ranks 1 2 3 4 and 2 1 3 4: 1 - 6 * 2 / (4 * 15).
    assert spearman([1, 5, 6, 9], [0.2, 0.1, 7, 8]) == pytest.approx(0.8)
    # Ranks 1.5 1.5 3 and 1 2 3: deviations -.5 -.5 1 and -1 0 1.
    assert spearman([4, 4, 9], [1, 2, 3]) == pytest.approx(1.5 / (1.5 * 2) ** 0.5)
    assert spearman([1, 2, 3], [8, 4, 2]) == pytest.approx(-1)
    assert spearman([1, 2], [1, 2]) == pytest.approx(1)
    assert pearson([1, 1], [1, 2]) is None and spearman([1, 2], [0.1, 0.1]) is None


def test_spearman_knows_only_order():
    rng = np.random.default_rng(9)
    first = rng.integers(0, 5, 30)
    second = first + rng.normal(size=30)
    assert spearman(np.exp(first), second**3) == pytest.approx(spearman(first, second), abs=1e-12)
    assert spearman(-first, second) == pytest.approx(-spearman(first, second), abs=1e-12)
    assert pearson(3 * second + 1, first) == pytest.approx(pearson(first, second), abs=1e-12)


@pytest.mark.parametrize(
    "first, second", [([], []), ([1], [2]), ([1, 2], [1]), ([[1, 2]], [[1, 2]])])
def test_no_correlation(first, second):
    with pytest.raises(ValueError, match="two equally long lists"):
        pearson(first, second)


def test_statistics_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(10)
    for _ in range(50):
        size = int(rng.integers(3, 40))
        first, second = rng.integers(0, 6, (2, size)) + rng.normal(size=(2, 1))
        if np.ptp(first) and np.ptp(second):
            assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second)[0])
            assert pearson(first, second) == pytest.approx(stats.pearsonr(first, second)[0])
        agreed = int(rng.integers(0, size + 1))
        interval = stats.binomtest(agreed, size).proportion_ci(method="wilson")
        assert wilson_interval(agreed, size) == pytest.approx((interval.low, interval.high))


def test_confusion_and_kappa_against_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(11)
    for _ in range(20):
        first, second = rng.integers(0, 3, (2, 30))
        counts = confusion(first, second, 3)
        assert counts.tolist() == metrics.confusion_matrix(first, second, labels=[0, 1, 2]).tolist()
        assert cohen_kappa(counts) == pytest.approx(metrics.cohen_kappa_score(first, second))
