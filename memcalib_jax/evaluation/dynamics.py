"""How credit assignment moves over a run, from its traces (4.4, D.4 and J, arXiv 2609.24259)."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from memcalib_jax.credit import CHANNELS
from memcalib_jax.evaluation.trace import Trace

GROUPS = {
    "correct use": (4, 8),
    "over-use": (1, 2, 5),
    "under-use": (3, 6, 7),
    "corrective": (1, 2, 3, 5, 6, 7),
}
"""Localizable channels by what they reward; corrective is over-use and under-use together."""

OUTCOMES = ("all maximum", "mixed", "uniform intermediate", "all minimum")
PHASES = ("early", "middle", "late")
PERCENTILES = (5, 95, 99)
WINDOW = 7
"""Steps of a centred mean."""

_NUM = len(CHANNELS)


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """One step in numbers; rates are kept as counts, so that steps can be pooled.

    Attributes:
      step: from 1.
      responses: valid responses.
      invalid: the others.
      prompts: groups.
      entropy: nats.
      thresholds_C: used in the step, nats.
      triggered_C: valid responses in which the channel holds an atom: candidates of localization.
      localized_C: those whose credit was moved.
      varied_C: groups whose valid rewards are not all equal.
      outcomes_C_O: groups by `OUTCOMES`; only those with two valid responses or more, and with an
        atom of the channel's ideal level.
      left_out_C: groups without an atom of the channel's ideal level.
      sentence_mean, sentence_tokens: mean effective multiplier and length of each sentence of each
        localized pair.
      capped: localized pairs with a token at the cap.
      conservation_C: largest |mean of a pair's token advantages - its advantage|, before RMS.
      conservation: largest |mean of a response's token advantages - S / RMS|; NaN for GRPO.
    """

    step: int
    responses: int
    invalid: int
    prompts: int
    entropy: float
    thresholds_C: np.ndarray
    triggered_C: np.ndarray
    localized_C: np.ndarray
    varied_C: np.ndarray
    outcomes_C_O: np.ndarray
    left_out_C: np.ndarray
    sentence_mean: np.ndarray
    sentence_tokens: np.ndarray
    capped: int
    conservation_C: np.ndarray
    conservation: float


def step_figures(trace: Trace, *, sentence_responses: int = 0) -> StepFigures:
    """Returns a step's numbers.

    Args:
      trace: of the step.
      sentence_responses: sentences are found in so many of the responses with moved credit, spread
        evenly over the step; 0: in all.
    """
    outcomes, left_out, varied = _outcomes(trace)
    means, tokens = _sentences(trace, sentence_responses)
    pairs = np.flatnonzero(trace.localized_S)
    errors = np.zeros(_NUM)
    for pair in pairs:
        channel = trace.pair_channel_S[pair]
        advantage = trace.channel_advantages_R_C[trace.pair_response_S[pair], channel]
        error = abs(advantage * (trace.effective_of(pair).mean() - 1.0))
        errors[channel] = max(errors[channel], error)
    valid = trace.valid_R
    return StepFigures(
        trace.step, int(valid.sum()), int((~valid).sum()), len(trace.records), trace.entropy,
        trace.thresholds_C.astype(np.float64),
        (trace.rewards_R_C[valid] != 0).sum(axis=0),
        np.bincount(trace.pair_channel_S[pairs], minlength=_NUM),
        varied, outcomes, left_out, means, tokens,
        sum(bool((trace.multiplier_of(pair) >= np.float32(trace.settings["cap"])).any())
            for pair in pairs),
        errors, _merged_error(trace))


def _outcomes(trace):
    counts, left_out = np.zeros((_NUM, len(OUTCOMES)), int), np.zeros(_NUM, int)
    varied = np.zeros(_NUM, int)
    for number, record in enumerate(trace.records):
        members = np.flatnonzero((trace.record_R == number) & trace.valid_R)
        levels = {atom["ideal"] for atom in record["atoms"]}
        for channel in range(_NUM):
            ideal, actual = divmod(channel, 3)
            if ideal not in levels:
                left_out[channel] += 1
                continue
            if len(members) < 2:
                continue
            rewards = trace.rewards_R_C[members, channel]
            best, worst = (1, 0) if ideal == actual else (0, -abs(actual - ideal))
            if trace.settings["merge_overuse"] and channel == 1:
                worst = -2  # both over-use sets of Ignore atoms
            if (rewards != rewards[0]).any():
                outcome = "mixed"
                varied[channel] += 1
            elif rewards[0] == best:
                outcome = "all maximum"
            else:
                outcome = "all minimum" if rewards[0] == worst else "uniform intermediate"
            counts[channel, OUTCOMES.index(outcome)] += 1
    return counts, left_out, varied


def _sentences(trace, most):
    pairs = np.flatnonzero(trace.localized_S)
    responses = np.unique(trace.pair_response_S[pairs])
    if 0 < most < len(responses):
        responses = responses[np.linspace(0, len(responses) - 1, most).round().astype(int)]
    means, tokens = [np.zeros(0)], [np.zeros(0, int)]
    for response in responses:
        ids = trace.sentences_of(response)
        lengths = np.bincount(ids)
        for pair in pairs[trace.pair_response_S[pairs] == response]:
            sums = np.bincount(ids, weights=trace.effective_of(pair))
            means.append(sums[lengths > 0] / lengths[lengths > 0])
            tokens.append(lengths[lengths > 0])
    return np.concatenate(means), np.concatenate(tokens)


def _merged_error(trace):
    if trace.rms is None:
        return float("nan")
    totals = trace.channel_advantages_R_C.astype(np.float64) @ np.array(
        trace.settings["channel_weights_C"]) / trace.rms
    return max((abs(trace.advantage_N[trace.tokens_of(response)].astype(np.float64).mean()
                    - totals[response]) for response in np.flatnonzero(trace.valid_R)
                if trace.length_R[response]), default=0.0)


def weighted_percentile(values: Sequence[float], weights: Sequence[float],
                        percent: float) -> float:
    """Returns the least value with at least `percent` of the weight at or below it; NaN of none."""
    values, weights = np.asarray(values, np.float64), np.asarray(weights, np.float64)
    if not len(values):
        return float("nan")
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    place = np.searchsorted(reached, percent / 100 * reached[-1] * (1 - 1e-12))
    return float(values[order][min(place, len(values) - 1)])


def centred_mean(steps: Sequence[int], values: Sequence[float]) -> np.ndarray:
    """Averages each step's value with those of the three steps on either side that are there.

    A step without a value (NaN) adds nothing to its neighbours.
    """
    steps, values = np.asarray(steps), np.asarray(values, np.float64)
    result = np.full(len(values), np.nan)
    for place, step in enumerate(steps):
        near = values[np.abs(steps - step) <= WINDOW // 2]
        if np.isfinite(near).any():
            result[place] = near[np.isfinite(near)].mean()
    return result


def thirds(figures: Sequence[StepFigures]) -> dict[str, list[StepFigures]]:
    """Splits a run into early, middle and late by step number, like 1-42, 43-83, 84-125 of 125.

    The run is as long as its last step's number; a third without steps is left out.
    """
    last = max(one.step for one in figures)
    bounds = [round(last * part / 3) for part in range(4)]
    split = {name: [one for one in figures if low < one.step <= high]
             for name, low, high in zip(PHASES, bounds, bounds[1:])}
    return {name: chosen for name, chosen in split.items() if chosen}


def rates(figures: Sequence[StepFigures]) -> dict[str, float]:
    """Returns the rates of some steps pooled: counts are summed before ratios are taken (J).

    In percent, NaN where nothing could be counted. A group of channels' `localized` pools its
    candidates; its `non-degenerate` averages its channels equally.
    """
    def total(name):
        return sum(getattr(one, name) for one in figures)

    triggered, localized, varied = total("triggered_C"), total("localized_C"), total("varied_C")
    outcomes, responses, prompts = total("outcomes_C_O"), total("responses"), total("prompts")
    result = {}
    for channel, name in enumerate(CHANNELS):
        result |= {f"{name} triggered": _percent(triggered[channel], responses),
                   f"{name} localized": _percent(localized[channel], triggered[channel]),
                   f"{name} non-degenerate": _percent(varied[channel], prompts)}
    candidates = triggered[1:].sum()
    for name, channels in GROUPS.items():
        chosen = list(channels)
        result |= {
            f"{name} share of candidates": _percent(triggered[chosen].sum(), candidates),
            f"{name} localized": _percent(localized[chosen].sum(), triggered[chosen].sum()),
            f"{name} non-degenerate": _percent(varied[chosen].mean(), prompts)}
        counted = outcomes[chosen].sum(axis=0)
        result |= {f"{name} {outcome}": _percent(count, counted.sum())
                   for outcome, count in zip(OUTCOMES, counted)}
    values = np.concatenate([one.sentence_mean for one in figures])
    tokens = np.concatenate([one.sentence_tokens for one in figures])
    result["multiplier mean"] = (float((values * tokens).sum() / tokens.sum())
                                 if len(tokens) else float("nan"))
    for percent in PERCENTILES:
        result[f"multiplier p{percent}"] = weighted_percentile(values, tokens, percent)
    result["pairs at the cap"] = _percent(total("capped"), localized.sum())
    result["entropy"] = float(np.mean([one.entropy for one in figures]))
    for channel, name in enumerate(CHANNELS):
        result[f"{name} threshold"] = float(np.mean([one.thresholds_C[channel] for one in figures]))
    for channel, name in enumerate(CHANNELS):
        result[f"{name} conservation error"] = float(
            max(one.conservation_C[channel] for one in figures))
    result["merged conservation error"] = float(np.max([one.conservation for one in figures]))
    return result


def _percent(count, total):
    return float(100.0 * count / total) if total else float("nan")


def step_rows(figures: Iterable[StepFigures]) -> list[dict]:
    """Returns one row a step: counts, then `rates`."""
    return [{"step": one.step, "valid responses": one.responses, "invalid responses": one.invalid,
             "prompts": one.prompts} | rates([one]) for one in figures]


def phase_rows(figures: Sequence[StepFigures]) -> list[dict]:
    """Returns one row a third of training, and one of the whole run, with their `rates`."""
    parts = thirds(figures) | {"all": list(figures)}
    return [{"phase": name, "first step": chosen[0].step, "last step": chosen[-1].step,
             "steps": len(chosen), "valid responses": sum(one.responses for one in chosen)}
            | {f"{CHANNELS[channel]} prompts left out": int(sum(
                one.left_out_C[channel] for one in chosen)) for channel in range(_NUM)}
            | rates(chosen) for name, chosen in parts.items()]
