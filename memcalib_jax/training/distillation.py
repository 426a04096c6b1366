"""On-policy self-distillation from a teacher that sees levels and rubrics: OPSD (E.2).

The frozen start is the teacher. Nobody judges: each sampled token is compared with what the
teacher would have said in its place.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from memcalib_jax.data import prompt_batches
from memcalib_jax.models.lora import LoraConfig
from memcalib_jax.scoring.counterfactual import score_batch, score_packing
from memcalib_jax.scoring.packing import Packing
from memcalib_jax.training.bin_sizes import BinSizes, SizeTable, UsedSizes
from memcalib_jax.training.divergence import TaughtBatch, divergence_sums, teacher_buckets
from memcalib_jax.training.pairs import Pair, pack_pairs
from memcalib_jax.training.rollouts import Policy, Prompt, Rollouts, SamplingConfig, roll_out
from memcalib_jax.training.runner import RunConfig, Stepped, run_steps
from memcalib_jax.training.state import (
    Frozen, OptimizerConfig, TrainState, matrices_in, split)
from memcalib_jax.training.stopwatch import Stopwatch
from memcalib_jax.training.top_tokens import Buckets
from memcalib_jax.training.update import ObjectiveConfig, PolicyBatch, update

METHODS = ("opsd_pg", "opsd_gkd")
TOP_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Lesson:
    """A rendered record, and the same with what the teacher is shown besides."""

    prompt: Prompt
    teacher_tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """What a step does.

    Attributes:
      method: "opsd_pg" or "opsd_gkd".
      sampling: how responses are drawn.
      objective: constants of the update; its clip and KL weight are PG's alone.
      optimizer: the optimizer.
      mini_batch_size: responses of an optimizer step.
      bin_tokens: about the most tokens of one device call's bin.
      top_tokens: buckets of GKD besides the tail.
    """

    method: str
    sampling: SamplingConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    mini_batch_size: int
    bin_tokens: int = 8192
    top_tokens: int = TOP_TOKENS


def distill_step(state: TrainState, teacher_params: dict, policy: Policy,
                 lessons: Sequence[Lesson], key: jax.Array, settings: DistillConfig,
                 frozen: Frozen = Frozen(), *, sizes: BinSizes | None = None
                 ) -> tuple[Stepped, UsedSizes]:
    """Samples from the student, asks the teacher about each token, and updates.

    Args:
      state: consumed.
      teacher_params: the frozen start, in the dtype of the products.
      policy: shape and tokenizer; its parameters are taken from `state` and `frozen`.
      lessons: the step's prompts.
      key: the step's own key.
      settings: what to do.
      frozen: what completes `state.params`.
      sizes: sizes that bins may have, `scoring` for those of the teacher; None: any that
        `settings.bin_tokens` allows.
    """
    sizes = sizes or BinSizes.of(settings.bin_tokens)
    used, watch = UsedSizes(), Stopwatch()
    watch.phase("sample")
    student = dataclasses.replace(policy, params=matrices_in(
        frozen.combine(state.params), settings.objective.compute_dtype))
    rollouts = roll_out(student, [lesson.prompt for lesson in lessons], settings.sampling, key,
                        judges=None)
    responses = [[tuple(int(t) for t in sample.tokens) for sample in row]
                 for row in rollouts.samples]
    pairs = [(lesson, response) for lesson, row in zip(lessons, responses) for response in row]

    # The old log-probs of every mini-batch are those before the first update.
    batches, counted = [], []
    for first in range(0, len(pairs), settings.mini_batch_size):
        chosen = pairs[first:first + settings.mini_batch_size]
        watch.phase("teacher")
        packing = pack_pairs(policy.config, [
            Pair(lesson.teacher_tokens, response) for lesson, response in chosen], sizes.scoring)
        used.scoring.add(packing.bin_size)
        taught = _teach(settings, teacher_params, policy.config, packing)
        watch.phase("old_and_reference")
        packing = pack_pairs(policy.config, [
            Pair(lesson.prompt.tokens, response) for lesson, response in chosen], sizes.training)
        used.training.add(packing.bin_size)
        make = {"opsd_pg": _policy_batches, "opsd_gkd": _taught_batches}[settings.method]
        made, measured = make(settings, student, teacher_params, packing, taught)
        batches.append(made)
        counted.append(measured)

    watch.phase("update")
    for batch, measured in zip(batches, counted):
        measures = {} if settings.method == "opsd_pg" else {"measure": divergence_sums}
        state, losses = update(state, policy.config, batch, settings.objective,
                               settings.optimizer, frozen, **measures)
        measured |= losses
    watch.phase(None)
    metrics = {name: float(np.mean([measured[name] for measured in counted]))
               for name in counted[0]}
    if settings.method == "opsd_pg":
        # Only the first mini-batch meets the parameters that the old log-probs come from.
        metrics["loss/first_ratio_error"] = counted[0]["loss/max_ratio_error"]
    metrics |= _rollout_metrics(rollouts)
    metrics |= {f"time/{name}": seconds for name, seconds in watch.seconds.items()}
    metrics["time/sampled_tokens_per_second"] = rollouts.num_tokens / watch.seconds["sample"]
    state = state.replace(step=state.step + 1)
    return Stepped(state, metrics, _rows(rollouts)), used


def _teach(settings, params, config, packing: Packing):
    """Returns, pair by pair, what the method takes of the teacher: arrays `[length, ...]`."""
    temperature = settings.sampling.temperature
    if settings.method == "opsd_pg":
        return score_packing(params, config, packing, temperature)
    k = min(settings.top_tokens, config.vocab_size - 1)
    values = jax.device_get([teacher_buckets(params, config, batch, k, temperature)
                             for batch in packing.batches])
    return [packing.rows(list(part))
            for part in zip(*[(ids, *buckets) for ids, buckets in values])]


def _policy_batches(settings, student: Policy, teacher_params, packing: Packing, taught):
    """Makes PG's micro-batches: the advantage is log p_teacher - log p_old (k1), unnormalized."""
    temperature = settings.sampling.temperature
    old, reference = ([np.asarray(score_batch(params, student.config, batch, temperature)[0])
                       for batch in packing.batches]
                      for params in (student.params, teacher_params))
    masks = _masks(packing)
    advantages = [np.where(mask, teacher - before, 0.0) for mask, teacher, before in zip(
        masks, packing.batched(taught), old)]
    total = sum(mask.sum() for mask in masks)
    return ([PolicyBatch(*parts) for parts in zip(
        packing.batches, old, reference, advantages, masks)],
        {"distill/reverse_kl": -float(sum(a.sum(dtype=np.float64) for a in advantages) / total)})


def _taught_batches(settings, student: Policy, teacher_params, packing: Packing, taught):
    ids, chosen, tail = (packing.batched(rows, dtype) for rows, dtype in zip(
        taught, (np.int32, np.float32, np.float32)))
    return [TaughtBatch(batch, ids, Buckets(chosen, tail), mask)
            for batch, ids, chosen, tail, mask in zip(
                packing.batches, ids, chosen, tail, _masks(packing))], {}


def _masks(packing: Packing) -> list[np.ndarray]:
    return [np.arange(batch.targets.shape[1]) < batch.counts[:, None]
            for batch in packing.batches]


def _rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    samples = [sample for row in rollouts.samples for sample in row]
    lengths = [len(sample.tokens) for sample in samples]
    return {"rollout/length_mean": float(np.mean(lengths)),
            "rollout/length_max": float(max(lengths)),
            "rollout/stopped": float(np.mean([s.finish_reason == "stop" for s in samples])),
            "rollout/tokens": float(sum(lengths))}


def _rows(rollouts: Rollouts) -> list[dict]:
    return [{"id": prompt.record.id, "sample": g, "text": text,
             "tokens": [int(t) for t in sample.tokens], "finish_reason": sample.finish_reason}
            for prompt, samples, texts in zip(rollouts.prompts, rollouts.samples, rollouts.texts)
            for g, (sample, text) in enumerate(zip(samples, texts))]


def distill(run: RunConfig, settings: DistillConfig, policy: Policy, lessons: Sequence[Lesson],
            num_prompts: int, report: Callable[[str], None] = functools.partial(print, flush=True),
            *, lora: LoraConfig | None = None) -> TrainState:
    """Trains from the newest checkpoint, or from `policy.params`, to `run.num_steps`.

    Args:
      run, settings: what to do.
      policy: the start, which is also the frozen teacher.
      lessons: rendered training records that fit, at least `num_prompts`.
      num_prompts: prompts of a step.
      report: takes one line of progress at a time.
      lora: trains a new adapter on the frozen start; None: all parameters.
    """
    key = jax.random.key(run.seed)
    trained, frozen = split(policy.params, policy.config, lora, jax.random.fold_in(key, 0))
    teacher = matrices_in(policy.params, settings.objective.compute_dtype)
    stream = prompt_batches(lessons, num_prompts=num_prompts, seed=run.seed)
    sizes = SizeTable(settings.bin_tokens)

    def one_step(state, step):
        stepped, used = distill_step(
            state, teacher, policy, next(stream), jax.random.fold_in(key, step), settings, frozen,
            sizes=sizes.allowed(step))
        sizes.note(used)
        return stepped

    return run_steps(run, trained, settings.optimizer,
                     {"prompts": stream, "bin_sizes": sizes}, one_step, _describe, report)


def _describe(values: dict[str, float]) -> str:
    distance = values.get("distill/reverse_kl", values["loss/total"])
    return (f"teacher KL {distance:.4f}  length {values['rollout/length_mean']:.0f}"
            f"  stopped {100 * values['rollout/stopped']:.0f}%"
            f"  loss {values['loss/total']:+.4f}  grad {values['loss/grad_norm']:.2f}"
            f"  {values['time/sampled_tokens_per_second']:.0f} tok/s")
