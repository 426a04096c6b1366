"""One training step: a function of state, prompts, key and what the judge says."""

import collections
import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from memcalib_jax.credit import CreditConfig
from memcalib_jax.scoring.counterfactual import score_batch
from memcalib_jax.scoring.packing import Packing, pack
from memcalib_jax.scoring.prefix_tree import build_tree
from memcalib_jax.training import metrics
from memcalib_jax.training.advantages import (
    Credit,
    judged_levels,
    localized_credit,
    response_mask,
    score_channels,
    uniform_credit,
)
from memcalib_jax.training.judging import JudgePool
from memcalib_jax.training.rollouts import Policy, Prompt, Rollouts, SamplingConfig, roll_out
from memcalib_jax.training.state import Frozen, OptimizerConfig, TrainState, matrices_in
from memcalib_jax.training.stopwatch import Stopwatch
from memcalib_jax.training.update import ObjectiveConfig, PolicyBatch, update


class NoValidResponse(RuntimeError):
    """No response of a step was judged, so there is nothing to learn from."""


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What a step does.

    Attributes:
      method: "memcalib", "gdpo" or "grpo".
      credit: constants of the credit assignment.
      sampling: how responses are drawn.
      objective, optimizer: constants of the update.
      mini_batch_size: responses of an optimizer step, a multiple of the group size.
      representation: how prompts word their memories, "atomic" or "fluent".
      scoring_dtype: dtype of the products in the counterfactual pass.
      bin_tokens: tokens of one device call's bin.
      max_failed_judgments: share of failed judge calls above which the run stops.
    """

    method: str
    credit: CreditConfig
    sampling: SamplingConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    mini_batch_size: int
    representation: str = "atomic"
    scoring_dtype: str = "bfloat16"
    bin_tokens: int = 8192
    max_failed_judgments: float = 0.5


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The state after a step, its metrics and one JSON-able row a response."""

    state: TrainState
    metrics: dict[str, float]
    rows: list[dict]


@dataclasses.dataclass(frozen=True)
class _MiniBatch:
    """Some prompts' trees in the training layout, with old and reference log-probs."""

    prompts: range
    packing: Packing
    old: list[jax.Array]
    reference: list[jax.Array]


def train_step(state: TrainState, reference_params: dict, policy: Policy,
               prompts: list[Prompt], key: jax.Array, judges: JudgePool,
               settings: StepConfig, frozen: Frozen = Frozen(),
               on_phase: Callable[[str], None] | None = None) -> StepResult:
    """Samples, judges, assigns credit and updates.

    Args:
      state: consumed.
      reference_params: the frozen start, in the dtype of the products.
      policy: shape and tokenizer; its parameters are taken from `state` and `frozen`.
      prompts: the step's prompts.
      key: the step's own key.
      judges: where responses are judged.
      settings: what to do.
      frozen: what completes `state.params`.
      on_phase: told the name of each phase as it begins.

    Raises:
      NoValidResponse: no response, or too few, got a judgment; says why, by reason.
    """
    watch = Stopwatch(on_phase)
    watch.phase("sample")
    params = frozen.combine(state.params)
    policy = dataclasses.replace(
        policy, params=matrices_in(params, settings.objective.compute_dtype))
    rollouts = roll_out(policy, prompts, settings.sampling, key, judges)

    watch.phase("old_and_reference")
    batches = _mini_batches(policy, reference_params, rollouts, settings)
    jax.block_until_ready([(batch.old, batch.reference) for batch in batches])

    watch.phase("judge_wait")
    judgments = rollouts.judgments()
    levels = judged_levels(rollouts.records, judgments)
    _check_valid(judgments, settings.max_failed_judgments)

    mask = response_mask(rollouts, settings.sampling.max_tokens)
    if settings.method == "memcalib":
        watch.phase("counterfactual")
        scoring = dataclasses.replace(
            policy, params=matrices_in(params, settings.scoring_dtype))
        scores = score_channels(
            scoring, rollouts, levels, mode=settings.credit.mode,
            temperature=settings.sampling.temperature, representation=settings.representation,
            max_tokens=settings.sampling.max_tokens, bin_tokens=settings.bin_tokens)
        watch.phase("credit")
        assigned = localized_credit(levels, scores, mask, state.thresholds, settings.credit)
        state = state.replace(thresholds=assigned.thresholds_C)
        measured = metrics.localization_metrics(assigned, scores, levels)
    else:
        watch.phase("credit")
        assigned = uniform_credit(settings.method, levels, mask, settings.credit)
        measured = {}

    watch.phase("update")
    state, losses = _update(state, frozen, policy, batches, rollouts, levels.valid_P_G, assigned,
                            settings)
    state = state.replace(step=state.step + 1)
    watch.phase(None)
    measured |= losses
    measured |= metrics.rollout_metrics(rollouts, levels, judgments)
    measured |= metrics.channel_metrics(assigned, levels, settings.credit)
    measured |= _sampler_gap(rollouts, batches)
    measured |= metrics.time_metrics(watch, rollouts)
    return StepResult(state, measured, metrics.rollout_rows(rollouts, judgments, assigned))


def _mini_batches(policy, reference_params, rollouts: Rollouts, settings) -> list[_MiniBatch]:
    size = settings.mini_batch_size // settings.sampling.num_samples
    temperature = settings.sampling.temperature
    batches = []
    for first in range(0, len(rollouts.prompts), size):
        chosen = range(first, min(first + size, len(rollouts.prompts)))
        packing = pack([_tree(rollouts, p) for p in chosen], bin_tokens=settings.bin_tokens)
        old, reference = (
            [score_batch(params, policy.config, batch, temperature)[0]
             for batch in packing.batches]
            for params in (policy.params, reference_params))
        batches.append(_MiniBatch(chosen, packing, old, reference))
    return batches


def _tree(rollouts: Rollouts, p: int):
    responses = [sample.tokens for sample in rollouts.samples[p]]
    return build_tree([rollouts.prompts[p].tokens], responses,
                      [(0, g) for g in range(len(responses))])


def _check_valid(judgments, most_failed: float):
    flat = [judgment for row in judgments for judgment in row]
    reasons = collections.Counter(
        (judgment.reason or "").split(":")[0] for judgment in flat if not judgment.valid)
    failed = sum(count for reason, count in reasons.items() if reason != "empty_response")
    if sum(reasons.values()) == len(flat) or failed > most_failed * len(flat):
        counted = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        raise NoValidResponse(
            f"{sum(reasons.values())} of {len(flat)} responses have no valid judgment "
            f"({counted}); nothing was updated. Check the judge endpoint, then start the same "
            "command again: it resumes from the last checkpoint")


def _update(state, frozen, policy, batches, rollouts, valid_P_G, assigned: Credit, settings):
    all_metrics = []
    for batch in batches:
        lengths = [[len(s.tokens) for s in rollouts.samples[p]] for p in batch.prompts]
        advantages = batch.packing.batched(
            [[assigned.advantages_P_G_T[p, g, :n] for g, n in enumerate(row)]
             for p, row in zip(batch.prompts, lengths)])
        masks = batch.packing.batched(
            [[np.full(n, valid_P_G[p, g]) for g, n in enumerate(row)]
             for p, row in zip(batch.prompts, lengths)], bool)
        micro = [PolicyBatch(*parts) for parts in zip(
            batch.packing.batches, batch.old, batch.reference, advantages, masks)]
        state, measured = update(state, policy.config, micro, settings.objective,
                                 settings.optimizer, frozen)
        all_metrics.append(measured)
    averaged = {name: float(np.mean([m[name] for m in all_metrics])) for name in all_metrics[0]}
    # Only the first mini-batch meets the parameters that the old log-probs come from.
    averaged["loss/first_ratio_error"] = all_metrics[0]["loss/max_ratio_error"]
    return state, averaged


def _sampler_gap(rollouts: Rollouts, batches: list[_MiniBatch]) -> dict[str, float]:
    """Compares the sampler's log-probs with the training layout's."""
    gaps = []
    for batch in batches:
        rows = batch.packing.rows(jax.device_get(batch.old))
        for p, group in zip(batch.prompts, rows):
            gaps += [np.abs(np.asarray(sample.log_probs) - row)
                     for sample, row in zip(rollouts.samples[p], group)]
    gaps = np.concatenate(gaps)
    return {"sampler/log_prob_gap_mean": float(gaps.mean()),
            "sampler/log_prob_gap_max": float(gaps.max())}
