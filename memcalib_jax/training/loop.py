"""The training loop: data, steps, evaluation, metrics and checkpoints."""

import dataclasses
import functools
import pathlib
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
from memcalib_jax.training.checkpoint import Checkpoints, newest_state, states_of
from memcalib_jax.training.compiles import CompileLog
from memcalib_jax.training.judging import Journal, JudgePool
from memcalib_jax.training.logging import Progress, RunLog
from memcalib_jax.training.preemption import Preempted, StopSignal
from memcalib_jax.training.rollouts import Policy, Prompt, SamplingConfig, roll_out
from memcalib_jax.training.selection import BestCheckpoint
from memcalib_jax.training.state import TrainState, matrices_in, split
from memcalib_jax.training.step import StepConfig, train_step

# The adapter's first values come from a key of their own: no step has this number.
_ADAPTER_FOLD = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long a run goes and what it leaves behind.

    Attributes:
      run_dir: the run's folder.
      num_steps: steps in all, those before a resume included.
      num_prompts: prompts of a step.
      seed: of the shuffling and the sampling.
      save_every, eval_every: steps between checkpoints and evaluations; the last step has both.
      verify_sharing: compare the first step's counterfactuals with dense rows.
      stop: says when to save and stop.
    """

    run_dir: pathlib.Path
    num_steps: int
    num_prompts: int
    seed: int
    save_every: int
    eval_every: int
    verify_sharing: bool = False
    stop: StopSignal = dataclasses.field(default_factory=StopSignal)


def train(loop: LoopConfig, settings: StepConfig, policy: Policy, prompts: list[Prompt],
          eval_prompts: list[Prompt], judge: Judge, background: BackgroundLoop,
          report: Callable[[str], None] = functools.partial(print, flush=True), *,
          lora: LoraConfig | None = None) -> TrainState:
    """Trains from the newest checkpoint, or from `policy.params`, to `num_steps`.

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
    key = jax.random.key(loop.seed)
    eval_key = jax.random.fold_in(key, 0)  # steps count from 1
    trained, frozen = split(policy.params, policy.config, lora,
                            jax.random.fold_in(key, _ADAPTER_FOLD))
    checkpoints = Checkpoints(loop.run_dir / "checkpoints")
    stream = prompt_batches(prompts, num_prompts=loop.num_prompts, seed=loop.seed)
    sizes = SizeTable(settings.bin_tokens)
    others = {"prompts": stream, "bin_sizes": sizes}
    state = newest_state(checkpoints, trained, settings.optimizer, others)
    first = int(state.step)
    if first >= loop.num_steps:
        report(f"the run has its {loop.num_steps} steps already; nothing to do "
               "(raise --num_steps to go on)")
    elif first:
        report(f"resuming after step {first}")

    reference = matrices_in(policy.params, settings.objective.compute_dtype)
    # All processes do the same; the main one writes it down.
    log = RunLog(loop.run_dir, start_step=first) if multihost.is_main() else None
    best = BestCheckpoint(loop.run_dir, eval_prompts,
                          min_valid=1 - settings.max_failed_judgments) if eval_prompts else None
    progress, compiles = Progress(first, loop.num_steps), CompileLog()
    saved = first

    def phase_begins(step: int, phase: str):
        # From the update on, the state that could be saved is consumed.
        if phase != "trace" and loop.stop.agreed():
            raise Preempted
        if step == first + 1:  # it compiles its programs and takes longest
            report(f"first step: {phase} ...")

    for step in range(first + 1, loop.num_steps + 1):
        last = step == loop.num_steps
        carried = states_of(others)
        journal = Journal(loop.run_dir / "judgments" / f"step_{step}.jsonl",
                          writer=jax.process_index())
        try:
            result = train_step(
                state, reference, policy, next(stream), jax.random.fold_in(key, step),
                JudgePool(judge, background, journal, shared=True), settings, frozen,
                sizes=sizes.allowed(step),
                verify_sharing=loop.verify_sharing and step == first + 1,
                on_phase=functools.partial(phase_begins, step))
        except Preempted:
            if saved < step - 1:
                checkpoints.save(step - 1, state, carried)
            raise Preempted(f"told to stop in step {step}: step {step - 1} is saved, and the same "
                            "command goes on from there") from None
        journal.close()
        sizes.note(result.bin_sizes)
        state, values = result.state, result.metrics
        if eval_prompts and (last or step % loop.eval_every == 0):
            current = dataclasses.replace(policy, params=matrices_in(
                frozen.combine(state.params), settings.objective.compute_dtype))
            values |= _evaluate(current, eval_prompts, jax.random.fold_in(eval_key, step),
                                judge, background, loop, settings, step)
            best.offer(step, state.params, values)
        compiled = compiles.take()
        values |= compiled.metrics()
        if log:
            log.rollouts(step, result.rows)
            if result.trace is not None:
                write_atomically(trace_path(loop.run_dir, step), to_bytes(result.trace))
            log.metrics(step, values)
        if str(compiled):
            report(str(compiled))
        report(progress.line(step, values))
        if last or step % loop.save_every == 0:
            checkpoints.save(step, state, states_of(others))
            saved = step
    if log:
        log.close()
    checkpoints.close()
    if best:
        if str(best):
            report(str(best))
        best.close()
    return state


def _evaluate(policy, prompts, key, judge, background, loop, settings, step):
    """Answers each evaluation prompt once; returns the metrics under `eval/`."""
    journal = Journal(loop.run_dir / "judgments" / f"eval_{step}.jsonl",
                      writer=jax.process_index())
    sampling = SamplingConfig(1, settings.sampling.max_tokens)
    rollouts = roll_out(policy, prompts, sampling, key,
                        JudgePool(judge, background, journal, shared=True))
    levels = judged_levels(rollouts.records, rollouts.judgments())
    journal.close()
    if not levels.valid_P_G.any():
        return {"eval/valid": 0.0}
    values = calibration_metrics(
        levels.ideal_P_G_A[:, 0], levels.actual_P_G_A[:, 0], levels.atom_mask_P_G_A[:, 0],
        valid_N=levels.valid_P_G[:, 0])
    return {f"eval/{name}": value for name, value in values.items()} | {
        "eval/valid": float(np.mean(levels.valid_P_G))}
