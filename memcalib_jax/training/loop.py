"""The training loop: data, judged steps, evaluation and the best checkpoint."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

from memcalib_jax.api import BackgroundLoop
from memcalib_jax.data import prompt_batches
from memcalib_jax.evaluation import calibration_metrics
from memcalib_jax.evaluation.trace import to_bytes, trace_path
from memcalib_jax.files import write_atomically
from memcalib_jax.judge import Judge
from memcalib_jax.models.lora import LoraConfig
from memcalib_jax.parallel import multihost
from memcalib_jax.training.advantages import judged_levels
from memcalib_jax.training.bin_sizes import SizeTable
from memcalib_jax.training.judging import Journal, JudgePool
from memcalib_jax.training.preemption import Preempted
from memcalib_jax.training.rollouts import Policy, Prompt, SamplingConfig, roll_out
from memcalib_jax.training.runner import RunConfig, Stepped, run_steps
from memcalib_jax.training.selection import BestCheckpoint
from memcalib_jax.training.state import TrainState, matrices_in, split
from memcalib_jax.training.step import StepConfig, train_step

# The adapter's first values come from a key of their own: no step has this number.
_ADAPTER_FOLD = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long a run goes, on how much a step, and what it leaves behind.

    Attributes:
      run: the run's folder, steps, checkpoints and seed, which is that of shuffling and sampling.
      num_prompts: prompts of a step.
      eval_every: steps between evaluations; the last step has one.
      verify_sharing: compare the first step's counterfactuals with dense rows.
    """

    run: RunConfig
    num_prompts: int
    eval_every: int
    verify_sharing: bool = False


def train(loop: LoopConfig, settings: StepConfig, policy: Policy, prompts: list[Prompt],
          eval_prompts: list[Prompt], judge: Judge, background: BackgroundLoop,
          report: Callable[[str], None] = functools.partial(print, flush=True), *,
          lora: LoraConfig | None = None) -> TrainState:
    """Trains from the newest checkpoint, or from `policy.params`, to the run's `num_steps`.

    A step is a function of the state, its prompts, the seed and the journalled judgments: a run
    that was killed does the steps since its checkpoint again and comes to the same numbers.

    Args:
      loop, settings: what to do.
      policy: the start, which is also the frozen reference.
      prompts: rendered training records that fit.
      eval_prompts: rendered evaluation records; none: no evaluation.
      judge: asked on `background`.
      background: the loop that judge calls run on.
      report: takes one line of progress at a time.
      lora: trains a new adapter on the frozen start; None: all parameters.

    Raises:
      Preempted: told to stop; what has been done is saved.
    """
    run = loop.run
    key = jax.random.key(run.seed)
    eval_key = jax.random.fold_in(key, 0)  # steps count from 1
    trained, frozen = split(policy.params, policy.config, lora,
                            jax.random.fold_in(key, _ADAPTER_FOLD))
    stream = prompt_batches(prompts, num_prompts=loop.num_prompts, seed=run.seed)
    sizes = SizeTable(settings.bin_tokens)
    reference = matrices_in(policy.params, settings.objective.compute_dtype)
    best = BestCheckpoint(run.run_dir, eval_prompts,
                          min_valid=1 - settings.max_failed_judgments) if eval_prompts else None
    first = None

    def judged(name: str):
        journal = Journal(run.run_dir / "judgments" / f"{name}.jsonl",
                          writer=jax.process_index())
        return contextlib.closing(journal), JudgePool(judge, background, journal, shared=True)

    def one_step(state: TrainState, step: int) -> Stepped:
        nonlocal first
        first = first or step

        def phase_begins(phase: str):
            # From the update on, the state that could be saved is consumed.
            if phase != "trace" and run.stop.agreed():
                raise Preempted
            if step == first:  # it compiles its programs and takes longest
                report(f"first step: {phase} ...")

        journal, pool = judged(f"step_{step}")
        with journal:
            result = train_step(
                state, reference, policy, next(stream), jax.random.fold_in(key, step), pool,
                settings, frozen, sizes=sizes.allowed(step),
                verify_sharing=loop.verify_sharing and step == first, on_phase=phase_begins)
        sizes.note(result.bin_sizes)
        values = result.metrics
        if eval_prompts and (step == run.num_steps or step % loop.eval_every == 0):
            current = dataclasses.replace(policy, params=matrices_in(
                frozen.combine(result.state.params), settings.objective.compute_dtype))
            journal, pool = judged(f"eval_{step}")
            with journal:
                values |= _evaluate(current, eval_prompts, jax.random.fold_in(eval_key, step),
                                    pool, settings)
            best.offer(step, result.state.params, values)
        if result.trace is not None and multihost.is_main():
            write_atomically(trace_path(run.run_dir, step), to_bytes(result.trace))
        return Stepped(result.state, values, result.rows)

    state = run_steps(run, trained, settings.optimizer,
                      {"prompts": stream, "bin_sizes": sizes}, one_step, describe, report)
    if best:
        if str(best):
            report(str(best))
        best.close()
    return state


def describe(values: dict[str, float]) -> str:
    """Returns a step's line on the console."""
    return (f"SCS {values['rollout/SCS']:.1f}"
            f"  Exact {values['rollout/Exact']:.1f}"
            f"  over {values['rollout/sMOS']:.1f}"
            f"  under {values['rollout/sMUS']:.1f}"
            f"  valid {100 * values['judge/valid']:.0f}%"
            f"  length {values['rollout/length_mean']:.0f}"
            f"  loss {values['loss/total']:+.4f}"
            f"  kl {values['loss/kl']:.5f}"
            f"  grad {values['loss/grad_norm']:.2f}"
            f"  {values['time/sampled_tokens_per_second']:.0f} tok/s")


def _evaluate(policy, prompts, key, pool, settings):
    """Answers each evaluation prompt once; returns the metrics under `eval/`."""
    sampling = SamplingConfig(1, settings.sampling.max_tokens)
    rollouts = roll_out(policy, prompts, sampling, key, pool)
    levels = judged_levels(rollouts.records, rollouts.judgments())
    if not levels.valid_P_G.any():
        return {"eval/valid": 0.0}
    values = calibration_metrics(
        levels.ideal_P_G_A[:, 0], levels.actual_P_G_A[:, 0], levels.atom_mask_P_G_A[:, 0],
        valid_N=levels.valid_P_G[:, 0])
    return {f"eval/{name}": value for name, value in values.items()} | {
        "eval/valid": float(np.mean(levels.valid_P_G))}
