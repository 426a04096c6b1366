import dataclasses

import numpy as np
import pytest
from made_traces import traced

from memcalib_jax.evaluation import dynamics, dynamics_figures
from memcalib_jax.evaluation.dynamics import (
    centred_mean,
    phase_rows,
    rates,
    step_figures,
    step_rows,
    thirds,
    weighted_percentile,
)

AB, B, C = 1, 4, 8


def hand_made(step=1, rewards_b=((1, 1), (1, 0), (0.5, 0.5), (0, 0), (1, 1))):
    """Five prompts of two one-token responses; the last has no Bound atom, all have an Ignore one.

    Rewards of B+ are as given. AB- is held, with reward -1, by both responses of the first prompt
    and by the first of the second. Response 3 (the second of prompt 1) is not judged.
    """
    trace = traced()
    rewards = np.zeros((10, 9), np.float32)
    rewards[:, B] = np.ravel(rewards_b)
    rewards[[0, 1, 2], AB] = -1
    valid = np.arange(10) != 3
    rewards[~valid] = 0
    fallback = np.where(rewards == 0, 1, 3).astype(np.int8)
    fallback[0, B], fallback[2, AB] = 0, 0
    advantages = np.zeros((10, 9), np.float32)
    advantages[0, B], advantages[2, AB] = 2.0, -1.0
    records = [{"id": f"r{p}", "question": "", "atoms": [
        {"id": "a", "text": "", "ideal": ideal} for ideal in ((0,) if p == 4 else (0, 1))]}
        for p in range(5)]
    lengths = np.ones(10, np.int32)
    lengths[[0, 2]] = 6, 5
    tokens = int(lengths.sum())
    advantage = np.zeros(tokens, np.float32)
    advantage[:6] = 1.25  # instead of 2 / 2
    return dataclasses.replace(
        trace, step=step, records=records, responses=[{"text": "", "finish_reason": "stop"}] * 10,
        settings=trace.settings | {"eta_C": [0.5] * 9, "cap": 3.0, "channel_weights_C": [1.0] * 9},
        rms=2.0, entropy=0.5 + step, record_R=np.repeat(np.arange(5), 2).astype(np.int32),
        sample_R=np.tile([0, 1], 5).astype(np.int32), valid_R=valid, length_R=lengths,
        actual_R_A=np.zeros((10, 2), np.int8), rewards_R_C=rewards,
        channel_advantages_R_C=advantages, signal_gate_R_C=fallback == 0,
        direction_gate_R_C=fallback == 0, fallback_R_C=fallback,
        thresholds_C=np.arange(9, dtype=np.float32) * step, token_N=np.zeros(tokens, np.int32),
        token_end_N=np.zeros(tokens, np.int32), advantage_N=advantage,
        sentence_N=np.array([0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1] + [0] * 7, np.int32)[:tokens],
        pair_response_S=np.array([0, 0, 2], np.int32), pair_channel_S=np.array([B, AB, AB]),
        difference=np.zeros(17, np.float32),
        multiplier=np.array([3, 3, 0, 0, 0, 0.06] + [1, 1, 1, 1, 1], np.float32))


def test_counts_of_a_step_by_hand():
    found = step_figures(hand_made())
    assert (found.responses, found.invalid, found.prompts, found.entropy) == (9, 1, 5, 1.5)
    assert found.triggered_C[[AB, B, C]].tolist() == [3, 7, 0]
    assert found.localized_C[[AB, B, C]].tolist() == [1, 1, 0]
    # Prompt 1 has one judged response only, prompt 4 no Bound atom.
    assert found.outcomes_C_O[B].tolist() == [1, 0, 1, 1]
    assert found.outcomes_C_O[AB].tolist() == [3, 0, 0, 1]
    assert found.left_out_C.tolist() == [0, 0, 0, 1, 1, 1, 5, 5, 5]
    assert found.varied_C.tolist() == [0] * 9
    # Effective multipliers of the first pair: 2 2 | .5 .5 .5 .53; the other's are 1.
    np.testing.assert_allclose(found.sentence_mean, [2.0, 2.03 / 4, 1.0, 1.0], atol=1e-7)
    assert found.sentence_tokens.tolist() == [2, 4, 3, 2] and found.capped == 1
    # 2 x .5 x (6.06 / 6 - 1), and 1.25 instead of 1.
    np.testing.assert_allclose(found.conservation_C[[AB, B, C]], [0, 0.01, 0], atol=1e-7)
    assert found.conservation == pytest.approx(0.5)  # response 2: 0 instead of -1 / 2


def test_rewards_that_vary_are_mixed():
    found = step_figures(hand_made(rewards_b=((1, 0.5), (1, 1), (0.5, 1), (0, 1), (0, 0))))
    assert found.outcomes_C_O[B].tolist() == [0, 3, 0, 0] and found.varied_C[B] == 3


def test_rates_pool_counts_before_dividing():
    one = step_figures(hand_made())
    other = dataclasses.replace(one, step=2, responses=1, triggered_C=np.ones(9, int),
                                localized_C=np.zeros(9, int), capped=0, entropy=3.5)
    found = rates([one, other])
    assert found["B+ triggered"] == pytest.approx(100 * 8 / 10)
    assert found["B+ localized"] == pytest.approx(100 * 1 / 8)
    assert found["correct use localized"] == pytest.approx(100 * 1 / 9)
    assert found["corrective localized"] == pytest.approx(100 * 1 / (3 + 6))
    assert found["correct use share of candidates"] == pytest.approx(100 * 9 / 18)
    assert found["correct use all maximum"] == pytest.approx(100 / 3)
    assert found["correct use uniform intermediate"] == pytest.approx(100 / 3)
    assert found["entropy"] == 2.5 and found["pairs at the cap"] == 50.0
    assert found["multiplier mean"] == pytest.approx((4 + 2.03 + 5) / 11)
    assert found["multiplier p5"] == pytest.approx(2.03 / 4)
    assert found["multiplier p99"] == pytest.approx(2.0)
    assert found["B+ conservation error"] == pytest.approx(0.01)
    nothing = rates([dataclasses.replace(
        one, triggered_C=np.zeros(9, int), sentence_mean=np.zeros(0),
        sentence_tokens=np.zeros(0, int))])
    assert np.isnan(nothing["corrective localized"]) and np.isnan(nothing["multiplier p95"])


def test_trigger_and_localization_counts_agree_with_the_trace():
    trace = traced()
    found = step_figures(trace)
    for channel in range(9):
        held = [bool(trace.atoms_of(r, channel)) for r in range(len(trace.length_R))]
        assert found.triggered_C[channel] == sum(held)
        assert found.localized_C[channel] == sum(
            trace.pair_channel_S[pair] == channel for pair in np.flatnonzero(trace.localized_S))
    assert found.conservation < 2e-6 and found.conservation_C.max() < 2e-6
    weights = found.sentence_tokens
    assert (found.sentence_mean * weights).sum() / weights.sum() == pytest.approx(1, abs=1e-6)
    assert weights.sum() == sum(trace.length_R[trace.pair_response_S[trace.localized_S]])


def test_sentences_of_some_responses_only():
    trace = traced()
    some = step_figures(trace, sentence_responses=2)
    assert 0 < len(some.sentence_tokens) < len(step_figures(trace).sentence_tokens)
    assert len(step_figures(trace, sentence_responses=99).sentence_tokens) == len(
        step_figures(trace).sentence_tokens)


@pytest.mark.parametrize("percent", [0.0, 5, 37.5, 50, 95, 99, 100])
def test_weighted_percentiles_are_those_of_repeated_values(percent):
    random = np.random.default_rng(0)
    for _ in range(20):
        values, weights = random.normal(size=9), random.integers(1, 7, 9)
        expected = np.quantile(np.repeat(values, weights), percent / 100, method="inverted_cdf")
        assert weighted_percentile(values, weights, percent) == expected


def test_a_centred_mean_by_hand():
    values = [0, 1, 2, 3, 4, 5, 6, 70]
    assert centred_mean(range(1, 9), values).tolist() == [
        1.5, 2, 2.5, 3, 13, 15, 17.6, 21.25]
    # Step 4 is missing, step 5 has no value.
    found = centred_mean([1, 2, 3, 5, 9], [1, 2, 6, np.nan, np.nan])
    assert found[:4].tolist() == [3, 3, 3, 4] and np.isnan(found[4])


@pytest.mark.parametrize("last, sizes", [(125, (42, 41, 42)), (9, (3, 3, 3)), (1, (1,)),
                                         (2, (1, 1)), (4, (1, 2, 1))])
def test_thirds_of_training(last, sizes):
    one = step_figures(hand_made())
    parts = thirds([dataclasses.replace(one, step=step) for step in range(1, last + 1)])
    assert tuple(map(len, parts.values())) == sizes
    if last == 125:
        assert [(part[0].step, part[-1].step) for part in parts.values()] == [
            (1, 42), (43, 83), (84, 125)]


def test_rows_of_steps_and_thirds():
    figures = [step_figures(hand_made(step)) for step in range(1, 7)]
    rows = step_rows(figures)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[4]["B+ threshold"] == 20.0 and rows[4]["invalid responses"] == 1
    phases = {row["phase"]: row for row in phase_rows(figures)}
    assert phases["middle"]["first step"] == 3 and phases["all"]["steps"] == 6
    assert phases["late"]["entropy"] == 6.0 and phases["all"]["C+ prompts left out"] == 30


def test_a_run_without_counterfactuals():
    found = step_figures(traced(method="grpo"))
    assert np.isnan(found.conservation) and found.localized_C.sum() == 0
    assert found.triggered_C.sum() > 0
    gdpo = step_figures(traced(method="gdpo"))
    assert gdpo.conservation < 1e-6


@pytest.mark.parametrize("method, steps", [("memcalib", 5), ("memcalib", 1), ("gdpo", 2)])
def test_pictures_of_any_run(method, steps):
    figures = [step_figures(traced(method=method, step=step)) for step in range(1, steps + 1)]
    for picture in (dynamics_figures.outcome_picture, dynamics_figures.variation_picture,
                    dynamics_figures.credit_picture):
        assert picture(figures).startswith(b"\x89PNG")
    assert set(dynamics.GROUPS["corrective"]) == set(
        dynamics.GROUPS["over-use"] + dynamics.GROUPS["under-use"])
