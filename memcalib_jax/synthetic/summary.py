"""What came out of a study: figures of each run, and of each arm over its seeds."""

import json
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memcalib_jax.evaluation.metrics import mean_and_std
from memcalib_jax.evaluation.summary import METRICS
from memcalib_jax.evaluation.trace import load_trace, trace_path
from memcalib_jax.synthetic.arms import Arm, metrics_of
from memcalib_jax.synthetic.credited import SUPPORT, UNDER_USE, credited, shares

GOAL = 70.0
"""The SCS whose first reaching is told."""
_WINDOW = 5  # steps whose mean has to reach the goal
_GAIN_STEP = 30
SUMMARY = "summary.json"
COMPARED = ("SCS", "Exact", "sMOS", "sMUS", "steps_to_goal", "length")
"""Columns that are compared seed by seed."""

COLUMNS = {
    **{name: f"{name} %" for name in METRICS},
    "gain": f"SCS gained in {_GAIN_STEP} steps", "steps_to_goal": f"steps to SCS {GOAL:g}",
    "length": "tokens", "unstopped": "unstopped %", "kl": "KL nats",
    "threshold_B": "threshold B+", "threshold_C": "threshold C+",
    "hits": "top token own value %", "own": "credit on own values %",
    "right_early": "under-use credit on right words, 1st third %",
    "right_late": "the same, last third %", "stop": "under-use credit on the stop token %"}


@dataclass(frozen=True)
class Run:
    """A finished run: its arm, its seed with the metrics of the cold start, its figures by the
    names of `COLUMNS`, and its metrics by step."""

    arm: str
    seed: int
    start: dict[str, float]
    figures: dict[str, float | None]
    steps: list[dict]


def summarize_run(run_dir: pathlib.Path, arm: Arm, seed: int, start: dict[str, float]) -> dict:
    """Sums a run up, from its metrics and traces.

    Args:
      run_dir: of a run that has all its steps.
      arm, seed: whose it is.
      start: metrics of the cold start on the evaluation's records.
    """
    steps = metrics_of(run_dir)
    last = steps[-1]
    at_gain = next((row for row in steps if row["step"] == _GAIN_STEP and "eval/SCS" in row), None)
    figures = {name: last[f"eval/{name}"] for name in METRICS} | {
        "gain": at_gain["eval/SCS"] - start["SCS"] if at_gain else None,
        "steps_to_goal": steps_to_goal([row["rollout/SCS"] for row in steps]),
        "length": last["rollout/length_mean"],
        "unstopped": 100.0 * (1.0 - last["rollout/stopped"]), "kl": last["loss/kl"],
        "threshold_B": last.get("credit/B+/threshold"),
        "threshold_C": last.get("credit/C+/threshold")}
    if arm.method == "memcalib":
        moved = [credited(load_trace(trace_path(run_dir, row["step"]))) for row in steps]
        third = -(-len(moved) // 3)
        figures |= {
            "hits": shares(moved, SUPPORT, "hits"), "own": shares(moved, SUPPORT, "own"),
            "right_early": shares(moved[:third], UNDER_USE, "right"),
            "right_late": shares(moved[-third:], UNDER_USE, "right"),
            "stop": shares(moved, UNDER_USE, "stop")}
    return {"arm": str(arm), "seed": seed, "num_steps": last["step"], "start": start,
            "figures": {name: _number(figures.get(name)) for name in COLUMNS}}


def _number(value):
    return None if value is None or math.isnan(value) else float(value)


def steps_to_goal(scs: Sequence[float]) -> int | None:
    """Returns after how many steps the mean of five steps' rollouts first reaches the goal.

    None if it never does.
    """
    for step in range(_WINDOW, len(scs) + 1):
        if np.mean(scs[step - _WINDOW:step]) >= GOAL:
            return step
    return None


def read_summary(run_dir: pathlib.Path) -> dict:
    """Returns what `summarize_run` said of a run.

    Raises:
      FileNotFoundError: the run is not finished.
    """
    return json.loads((run_dir / SUMMARY).read_text())


def load_runs(folder: pathlib.Path) -> list[Run]:
    """Reads the runs of a folder that are finished, by arm and seed."""
    runs = []
    for path in folder.glob(f"*/*/{SUMMARY}"):
        found = read_summary(path.parent)
        runs.append(Run(found["arm"], found["seed"], found["start"], found["figures"],
                        metrics_of(path.parent)))
    return sorted(runs, key=lambda run: (run.arm, run.seed))


def by_arm(runs: Sequence[Run]) -> dict[str, dict]:
    """Returns of each arm its seeds, and of each column the values, their mean and deviation.

    The deviation is that of a sample (n - 1). Runs without a value are left out of both; of
    `steps_to_goal` those are the runs that never reached it.
    """
    arms = {}
    for arm in dict.fromkeys(run.arm for run in runs):
        mine = [run for run in runs if run.arm == arm]
        columns = {}
        for name in COLUMNS:
            values = [run.figures[name] for run in mine]
            there = [value for value in values if value is not None]
            mean, std = mean_and_std(there) if there else (None, None)
            columns[name] = {"values": values, "mean": mean, "std": std}
        arms[arm] = {"seeds": [run.seed for run in mine], "columns": columns}
    return arms


def paired(runs: Sequence[Run], arm: str, reference: str, column: str) -> dict | None:
    """Returns how much higher an arm is than another on the seeds of both: mean, deviation, count.

    None where they share no seed with a value.
    """
    values = {(run.arm, run.seed): run.figures[column] for run in runs}
    differences = [
        value - values[reference, seed] for (name, seed), value in values.items()
        if name == arm and value is not None and values.get((reference, seed)) is not None]
    if not differences:
        return None
    mean, std = mean_and_std(differences)
    return {"mean": mean, "std": std, "count": len(differences)}


def start_columns(runs: Sequence[Run]) -> dict[str, dict]:
    """Returns of each metric its values at the seeds' cold starts, their mean and deviation."""
    starts = {run.seed: run.start for run in runs}
    columns = {}
    for name in METRICS:
        values = [start[name] for start in starts.values()]
        mean, std = mean_and_std(values)
        columns[name] = {"values": values, "mean": mean, "std": std}
    return columns


def differences(runs: Sequence[Run]) -> dict[str, dict]:
    """Returns what each arm has more than memcalib on the same seeds, by arm and column.

    Empty where the runs are of no arm, or of several, by the name of memcalib.
    """
    arms = list(dict.fromkeys(run.arm for run in runs))
    references = [arm for arm in arms if arm.startswith("memcalib@")]
    if len(references) != 1:
        return {}
    return {arm: {name: paired(runs, arm, references[0], name) for name in COMPARED}
            for arm in arms if arm != references[0]}


def markdown(runs: Sequence[Run]) -> str:
    """Lays arms out as Markdown: a row a figure, a column an arm."""
    arms, starts = by_arm(runs), start_columns(runs)
    lines = ["| | cold start | " + " | ".join(arms) + " |", "|---|" + "---|" * (len(arms) + 1),
             f"| seeds | {len({run.seed for run in runs})} | "
             + " | ".join(str(len(arm["seeds"])) for arm in arms.values()) + " |"]
    for name, title in COLUMNS.items():
        cells = [_cell(arm["columns"][name]) for arm in arms.values()]
        if any(cell != "-" for cell in cells):
            start = _cell(starts[name]) if name in starts else ""
            lines.append(f"| {title} | {start} | " + " | ".join(cells) + " |")
    lines += ["", "Mean ± standard deviation over seeds; (n of m) where only so many of the seeds "
              "have the value."]
    more = differences(runs)
    if more:
        lines += ["", "| more than memcalib on the same seeds | " + " | ".join(more) + " |",
                  "|---|" + "---|" * len(more)]
        lines += [f"| {COLUMNS[name]} | " + " | ".join(
            _difference(columns[name]) for columns in more.values()) + " |" for name in COMPARED]
    return "\n".join(lines)


def _difference(found: dict | None) -> str:
    if found is None:
        return "-"
    spread = "" if found["std"] is None else f" ± {found['std']:.1f}"
    return f"{found['mean']:+.1f}{spread} ({found['count']})"


def _cell(column: dict) -> str:
    if column["mean"] is None:
        return "-"
    text = f"{column['mean']:.2f}" if abs(column["mean"]) < 10 else f"{column['mean']:.1f}"
    if column["std"] is not None:
        text += f" ± {column['std']:.1f}" if column["mean"] >= 10 else f" ± {column['std']:.2f}"
    there = sum(value is not None for value in column["values"])
    return text + (f" ({there} of {len(column['values'])})"
                   if there < len(column["values"]) else "")
