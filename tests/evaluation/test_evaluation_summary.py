import numpy as np
import pytest

from memcalib_jax.evaluation.summary import METRICS, summarize

# Three records (two domains) of two atoms, two seeds. Steps from ideal to judged level:
#   record 0 (coding): ideal A, C; seed 0 judges A, C (0 over, 0 under); seed 1 C, C (2, 0)
#   record 1 (health): ideal A, B; seed 0 judges B, A (1, 1);            seed 1 is invalid
#   record 2 (health): ideal C, -; seed 0 judges B    (0, 1);            seed 1 A     (0, 2)
IDEAL = np.array([[0, 2], [0, 1], [2, 9]])[:, None].repeat(2, axis=1)
ACTUAL = np.array([[[0, 2], [2, 2]], [[1, 0], [7, 7]], [[1, 5], [0, 5]]])
MASK = np.array([[1, 1], [1, 1], [1, 0]], bool)[:, None].repeat(2, axis=1)
VALID = np.array([[1, 1], [1, 0], [1, 1]], bool)
DOMAINS = ["coding", "health", "health"]


@pytest.fixture(scope="module")
def summary():
    return summarize(IDEAL, ACTUAL, MASK, VALID, DOMAINS)


@pytest.mark.parametrize("metric, seeds", [
    ("SCS", [(1 + 0.25 + 0.5) / 3, (0.25 + 0.25) / 2]),
    ("Exact", [1 / 3, 0]),
    ("sMOS", [0.5 / 3, 0.75 / 2]),
    ("sMUS", [(0.5 + 0.5) / 3, 0.75 / 2]),
    ("AOR", [1 / 3, 1 / 2]),
    ("AUR", [2 / 3, 1 / 2]),
])
def test_means_and_deviations_are_over_the_seeds(summary, metric, seeds):
    first, second = (100 * value for value in seeds)
    overall = summary["overall"]
    assert [seed[metric] for seed in overall["seeds"]] == pytest.approx([first, second])
    assert overall["mean"][metric] == pytest.approx((first + second) / 2)
    # With two values the sample deviation is their distance over the root of two.
    assert overall["std"][metric] == pytest.approx(abs(first - second) / 2 ** 0.5)


def test_a_domain_counts_its_own_records(summary):
    health = summary["by_domain"]["health"]
    assert (health["records"], health["valid"]) == (2, 3)
    assert [seed["SCS"] for seed in health["seeds"]] == pytest.approx([37.5, 25.0])
    assert summary["by_domain"]["coding"]["mean"]["SCS"] == pytest.approx(62.5)


def test_channels_pool_the_valid_responses_of_all_seeds(summary):
    # Ideal A: seeds 0 and 1 of record 0, seed 0 of record 1. Ideal B: once. Ideal C: 2 + 2.
    atoms = {name: channel["atoms"] for name, channel in summary["channels"].items()}
    assert atoms == {"A+": 1, "AB-": 1, "AC-": 1, "BA-": 1, "B+": 0, "BC-": 0,
                     "CA-": 1, "CB-": 1, "C+": 2}
    assert summary["channels"]["C+"]["of_ideal"] == 50.0
    assert summary["channels"]["C+"]["of_all"] == 25.0
    assert summary["macro_accuracy"] == pytest.approx(100 * (1 / 3 + 0 + 1 / 2) / 3)


def test_a_domain_without_a_valid_response_in_a_seed_leaves_that_seed_out():
    valid = VALID.copy()
    valid[0, 1] = False
    summary = summarize(IDEAL, ACTUAL, MASK, valid, DOMAINS)
    coding = summary["by_domain"]["coding"]
    assert coding["seeds"][1] is None
    assert coding["mean"]["SCS"] == 100.0 and coding["std"]["SCS"] is None
    valid[0, 0] = False
    coding = summarize(IDEAL, ACTUAL, MASK, valid, DOMAINS)["by_domain"]["coding"]
    assert coding["mean"] == coding["std"] == dict.fromkeys(METRICS)


def test_a_level_that_no_atom_has_is_none_not_zero():
    summary = summarize(IDEAL[:1], ACTUAL[:1], MASK[:1], VALID[:1], DOMAINS[:1])
    assert summary["channels"]["B+"] == {"atoms": 0, "of_all": 0.0, "of_ideal": None}
    assert summary["macro_accuracy"] == 75.0


def test_a_seed_without_a_valid_response_is_refused():
    valid = VALID.copy()
    valid[:, 1] = False
    with pytest.raises(ValueError, match="seed 1 has no valid response"):
        summarize(IDEAL, ACTUAL, MASK, valid, DOMAINS)


def test_order_of_records_changes_nothing():
    order = [2, 0, 1]
    shuffled = summarize(IDEAL[order], ACTUAL[order], MASK[order], VALID[order],
                         [DOMAINS[i] for i in order])
    again = summarize(IDEAL, ACTUAL, MASK, VALID, DOMAINS)
    assert shuffled["channels"] == again["channels"]
    assert shuffled["overall"]["mean"] == pytest.approx(again["overall"]["mean"])
