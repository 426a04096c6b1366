"""One training step: a function of state, prompts, key and what the judge says."""

import collections
import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from memcalib_jax.credit import CreditConfig
from memcalib_jax.evaluation.trace import Trace
from memcalib_jax.scoring import ScoringGroup
from memcalib_jax.scoring.counterfactual import pack_groups, score_batch
from memcalib_jax.scoring.packing import Packing
from memcalib_jax.training import metrics
from memcalib_jax.training.advantages import (
    Credit,
    ScoringConfig,
    judged_levels,
    localized_credit,
    pairs_to_score,
    response_mask,
    score_channels,
    sentence_ids_of,
    stop_mask,
    uniform_credit,
)
from memcalib_jax.training.bin_sizes import BinSizes, UsedSizes
from memcalib_jax.training.judging import JudgePool
from memcalib_jax.training.rollouts import Policy, Prompt, Rollouts, SamplingConfig, roll_out
from memcalib_jax.training.state import Frozen, OptimizerConfig, TrainState, matrices_in
from memcalib_jax.training.sharing import check_sharing
from memcalib_jax.training.stopwatch import Stopwatch
from memcalib_jax.training.trace import make_trace
from memcalib_jax.training.update import ObjectiveConfig, PolicyBatch, averaged, update

# Which closed gates are scored draws from a key that no request's samples use.
_GATE_FOLD = 2**32 - 1


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
      scoring: how counterfactuals are scored.
      bin_tokens: about the most tokens of one device call's bin.
      max_failed_judgments: share of failed judge calls above which the run stops.
      trace: keep what explains each token's advantage.
    """

    method: str
    credit: CreditConfig
    sampling: SamplingConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    mini_batch_size: int
    scoring: ScoringConfig = ScoringConfig()
    bin_tokens: int = 8192
    max_failed_judgments: float = 0.5
    trace: bool = True


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The state after a step, its metrics, one JSON-able row a response, and the bins' sizes.

    `trace` explains the advantages; None where the settings want none.
    """

    state: TrainState
    metrics: dict[str, float]
    rows: list[dict]
    bin_sizes: UsedSizes
    trace: Trace | None = None


@dataclasses.dataclass(frozen=True)
class _MiniBatch:
    """Some prompts' trees in the training layout, with old and reference log-probs.

    The router's load is that of the old policy, None for a model without experts.
    """

    prompts: range
    packing: Packing
    old: list[jax.Array]
    reference: list[jax.Array]
    router_load: list[jax.Array | None]


def train_step(state: TrainState, reference_params: dict, policy: Policy,
               prompts: list[Prompt], key: jax.Array, judges: JudgePool,
               settings: StepConfig, frozen: Frozen = Frozen(), *,
               sizes: BinSizes | None = None, verify_sharing: bool = False,
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
      sizes: sizes that bins may have; None: any that `settings.bin_tokens` allows.
      verify_sharing: score the counterfactuals as dense rows too, and compare.
      on_phase: told the name of each phase as it begins.

    Raises:
      NoValidResponse: no response, or too few, got a judgment; says why, by reason.
      SharingMismatch: shared and dense scores differ by more than rounding.
    """
    sizes = sizes or BinSizes.of(settings.bin_tokens)
    used = UsedSizes()
    watch = Stopwatch(on_phase)
    watch.phase("sample")
    params = frozen.combine(state.params)
    policy = dataclasses.replace(
        policy, params=matrices_in(params, settings.objective.compute_dtype))
    rollouts = roll_out(policy, prompts, settings.sampling, key, judges)

    watch.phase("old_and_reference")
    batches = _mini_batches(policy, reference_params, rollouts, settings, sizes.training)
    used.training.update(batch.packing.bin_size for batch in batches)
    jax.block_until_ready([(batch.old, batch.reference) for batch in batches])

    watch.phase("judge_wait")
    judgments = rollouts.judgments()
    levels = judged_levels(rollouts.records, judgments)
    _check_valid(judgments, settings.max_failed_judgments)

    mask = response_mask(rollouts, settings.sampling.max_tokens)
    scores = sentences = stops = None
    # The update reuses the state's memory.
    thresholds = jax.device_get((state.thresholds, state.sentence_thresholds))
    if settings.method == "memcalib":
        watch.phase("counterfactual")
        scoring = dataclasses.replace(
            policy, params=matrices_in(params, settings.scoring.dtype))
        wanted = pairs_to_score(levels, settings.credit, settings.scoring.closed_gate_fraction,
                                jax.random.fold_in(key, _GATE_FOLD))
        scores = score_channels(
            scoring, rollouts, levels, wanted, settings.credit, settings.sampling,
            settings.scoring.representation, sizes.scoring)
        used.scoring.add(scores.packing.bin_size)
        if verify_sharing:
            watch.phase("verify_sharing")
            check_sharing(scoring, scores, settings.sampling.temperature)
        watch.phase("credit")
        sentences = (sentence_ids_of(policy.tokenizer, rollouts, settings.sampling.max_tokens)
                     if settings.credit.granularity == "sentence" else None)
        stops = (stop_mask(rollouts, settings.sampling.max_tokens)
                 if settings.credit.mode == "guarded" else None)
        assigned = localized_credit(levels, scores, mask, state.thresholds, settings.credit,
                                    sentences, state.sentence_thresholds, stops)
        state = state.replace(thresholds=assigned.thresholds_C,
                              sentence_thresholds=assigned.sentence_thresholds_C)
        measured = metrics.localization_metrics(assigned, scores, levels)
    else:
        watch.phase("credit")
        assigned = uniform_credit(settings.method, levels, mask, settings.credit)
        measured = {}

    watch.phase("update")
    state, losses = _update(state, frozen, policy, batches, rollouts, levels.valid_P_G, assigned,
                            settings)
    state = state.replace(step=state.step + 1)
    trace = None
    if settings.trace:
        watch.phase("trace")
        trace = make_trace(int(state.step), settings.method, policy.tokenizer, rollouts, judgments,
                           levels, assigned, scores, thresholds[0], settings.credit,
                           losses["loss/entropy"], sentence_ids_P_G_T=sentences,
                           sentence_thresholds_C=None if sentences is None else thresholds[1],
                           stop_mask_P_G_T=stops)
    watch.phase(None)
    measured |= losses
    measured |= metrics.rollout_metrics(rollouts, levels, judgments)
    measured |= metrics.channel_metrics(assigned, levels, settings.credit)
    measured |= _sampler_gap(rollouts, batches)
    if policy.config.experts:
        measured |= metrics.router_metrics(
            sum(load for batch in batches for load in jax.device_get(batch.router_load)))
    measured |= metrics.time_metrics(watch, rollouts)
    return StepResult(state, measured, metrics.rollout_rows(rollouts, judgments, assigned), used,
                      trace)


def _mini_batches(policy, reference_params, rollouts: Rollouts, settings,
                  bin_sizes) -> list[_MiniBatch]:
    count = settings.mini_batch_size // settings.sampling.num_samples
    temperature = settings.sampling.temperature
    batches = []
    for first in range(0, len(rollouts.prompts), count):
        chosen = range(first, min(first + count, len(rollouts.prompts)))
        packing = pack_groups(policy.config, [_group(rollouts, p) for p in chosen], bin_sizes,
                              keep_repeats=True)
        (old, _, load), (reference, _, _) = (
            zip(*[score_batch(params, policy.config, batch, temperature)
                  for batch in packing.batches])
            for params in (policy.params, reference_params))
        batches.append(_MiniBatch(chosen, packing, list(old), list(reference), list(load)))
    return batches


def _group(rollouts: Rollouts, p: int) -> ScoringGroup:
    responses = [sample.tokens for sample in rollouts.samples[p]]
    return ScoringGroup([rollouts.prompts[p].tokens], responses,
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
    return state, averaged(all_metrics)


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
