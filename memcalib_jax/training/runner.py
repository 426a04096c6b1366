"""Runs the steps of any training: resume, metrics, progress and checkpoints."""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable

from memcalib_jax.parallel import multihost
from memcalib_jax.training.checkpoint import Checkpoints, newest_state, states_of
from memcalib_jax.training.compiles import CompileLog
from memcalib_jax.training.logging import RunLog, duration
from memcalib_jax.training.preemption import Preempted, StopSignal
from memcalib_jax.training.state import OptimizerConfig, TrainState


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How long a run goes and what it leaves behind.

    Attributes:
      run_dir: the run's folder.
      num_steps: steps in all, those before a resume included.
      save_every: steps between checkpoints; the last step has one.
      seed: of whatever a step draws.
      stop: says when to save and stop.
    """

    run_dir: pathlib.Path
    num_steps: int
    save_every: int
    seed: int
    stop: StopSignal = dataclasses.field(default_factory=StopSignal)


@dataclasses.dataclass(frozen=True)
class Stepped:
    """What a step leaves: the state, its metrics, and one JSON-able row a response, if any."""

    state: TrainState
    metrics: dict[str, float]
    rows: list[dict] = dataclasses.field(default_factory=list)


def run_steps(run: RunConfig, trained: dict, optimizer: OptimizerConfig, others: dict,
              one_step: Callable[[TrainState, int], Stepped],
              describe: Callable[[dict[str, float]], str],
              report: Callable[[str], None] = functools.partial(print, flush=True), *,
              before: Callable[[TrainState], dict[str, float]] | None = None) -> TrainState:
    """Goes from the newest checkpoint, or from `trained`, to `num_steps`.

    A step is a function of the state, its number and what `others` hold: a run that was killed
    does the steps since its checkpoint again and comes to the same numbers.

    Args:
      run: how far.
      trained: parameters to start from.
      optimizer: gives the state's moments.
      others: what else a step changes, by name; each has `get_state` and `set_state`.
      one_step: takes the state and the step's number, from 1. It consumes the state, and raises
        `Preempted` only before it does; a "time/step" of its own stands in the metrics.
      describe: says a step's metrics in a few words.
      report: takes one line of progress at a time.
      before: returns the metrics of the start, logged as step 0.

    Raises:
      Preempted: told to stop; what has been done is saved.
    """
    checkpoints = Checkpoints(run.run_dir / "checkpoints")
    state = newest_state(checkpoints, trained, optimizer, others)
    first = int(state.step)
    if first >= run.num_steps:
        report(f"the run has its {run.num_steps} steps already; nothing to do")
    elif first:
        report(f"resuming after step {first}")

    # All processes do the same; the main one writes it down.
    log = (RunLog(run.run_dir, start_step=first if first else -1) if multihost.is_main()
           else None)
    compiles = CompileLog()
    if before and not first:
        values = before(state)
        if log:
            log.metrics(0, values)
        report(f"step 0/{run.num_steps}  {describe(values)}")
    started = time.monotonic()
    saved = first
    for step in range(first + 1, run.num_steps + 1):
        carried, since = states_of(others), time.monotonic()
        try:
            if run.stop.agreed():
                raise Preempted
            stepped = one_step(state, step)
        except Preempted:
            if saved < step - 1:
                checkpoints.save(step - 1, state, carried)
            raise Preempted(f"told to stop in step {step}: step {step - 1} is saved, and the same "
                            "command goes on from there") from None
        state = stepped.state
        values = {"time/step": time.monotonic() - since} | stepped.metrics
        compiled = compiles.take()
        values |= compiled.metrics()
        if log:
            log.metrics(step, values)
            if stepped.rows:
                log.rollouts(step, stepped.rows)
        if str(compiled):
            report(str(compiled))
        left = (time.monotonic() - started) / (step - first) * (run.num_steps - step)
        report(f"step {step}/{run.num_steps}  {describe(values)}  {values['time/step']:.1f} s"
               f"  left {duration(left)}")
        if step == run.num_steps or step % run.save_every == 0:
            checkpoints.save(step, state, states_of(others))
            saved = step
    if log:
        log.close()
    checkpoints.close()
    return state
