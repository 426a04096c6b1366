"""A run killed anywhere comes to the numbers of one that was not."""

import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

ROOT = pathlib.Path(__file__).parents[2]
NUM_STEPS = 6
FLAGS = ["--num_prompts=2", "--group_size=3", "--mini_batch_size=3", f"--num_steps={NUM_STEPS}",
         "--max_response_tokens=12", "--dtype=float32", "--learning_rate=1e-3",
         "--save_every=2", "--eval_every=3", "--judge_requests_per_minute=100000"]

# Kills the process without any clean-up when a phase of a step begins, or while a checkpoint's
# files are being written.
KILLER = """
import os, runpy, signal, sys
import orbax.checkpoint as ocp
from memcalib_jax.training import stopwatch
where, at_step = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]
seen = {"n": 0}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

original_phase = stopwatch.Stopwatch.phase
def phase(self, name):
    original_phase(self, name)
    seen["n"] += name == where
    if name == where and seen["n"] == at_step:
        die()
stopwatch.Stopwatch.phase = phase

original_wait = ocp.CheckpointManager.wait_until_finished
def wait(self):
    seen["n"] += where == "checkpoint"
    if where == "checkpoint" and seen["n"] == at_step:
        die()
    original_wait(self)
ocp.CheckpointManager.wait_until_finished = wait
runpy.run_module("experiments.train_rl", run_name="__main__", alter_sys=True)
"""

# (phase, its how-manieth occurrence in that process): steps are done again after each.
KILLS = [("old_and_reference", 1), ("judge_wait", 2), ("checkpoint", 1), ("counterfactual", 2),
         ("update", 1), ("sample", 4)]


def start(run_dir, model, records, judge_url, *killer):
    program = ["-c", KILLER, *killer] if killer else ["-m", "experiments.train_rl"]
    return subprocess.run(
        [sys.executable, *program, *FLAGS, f"--run_dir={run_dir}", f"--model_path={model}",
         f"--train_file={records}", f"--eval_file={records}", f"--judge_url={judge_url}",
         "--judge_model=lexical-stand-in"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(run_dir.parent / "jax_cache"),
                          "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model_dir, records_file, judge_url):
    """An uninterrupted run's folder and that of one that was killed again and again."""
    folder = tmp_path_factory.mktemp("runs")
    common = tiny_model_dir, records_file, judge_url
    whole = start(folder / "whole", *common)
    assert whole.returncode == 0, whole.stderr
    for phase, occurrence in KILLS:
        killed = start(folder / "killed", *common, phase, str(occurrence))
        assert killed.returncode == -signal.SIGKILL, (phase, killed.stdout, killed.stderr)
    finished = start(folder / "killed", *common)
    assert finished.returncode == 0, finished.stderr
    return folder / "whole", folder / "killed"


def metrics(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    return [{name: value for name, value in row.items()
             if not name.startswith(("time/", "judge/"))} for row in rows]


def test_metrics_are_the_same(runs):
    whole, killed = map(metrics, runs)
    assert [row["step"] for row in whole] == list(range(1, NUM_STEPS + 1))
    assert killed == whole
    assert {"eval/SCS", "credit/CA-/threshold", "loss/kl"} <= whole[-1].keys()
    assert all(row["loss/grad_norm"] > 0 for row in whole)


def test_parameters_optimizer_and_thresholds_are_the_same_bits(runs):
    for item in ("params", "state"):
        whole, killed = (ocp.StandardCheckpointer().restore(
            run / "checkpoints" / str(NUM_STEPS) / item) for run in runs)
        leaves = list(zip(jax.tree.leaves(whole), jax.tree.leaves(killed), strict=True))
        assert leaves
        for a, b in leaves:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_rollouts_are_the_same_bytes(runs):
    for step in range(1, NUM_STEPS + 1):
        whole, killed = ((run / "rollouts" / f"step_{step}.jsonl.gz").read_bytes()
                         for run in runs)
        assert killed == whole
        rows = [json.loads(line) for line in gzip.decompress(whole).splitlines()]
        assert len(rows) == 6
        assert all(len(row["advantages"]) == len(row["tokens"]) > 0 for row in rows)


def test_a_finished_run_has_nothing_to_do(runs, tiny_model_dir, records_file, judge_url):
    before = metrics(runs[0])
    again = start(runs[0], tiny_model_dir, records_file, judge_url)
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
    assert metrics(runs[0]) == before


def test_the_best_by_validation_is_the_same(runs):
    """Of the steps with an evaluation, the first with the highest SCS is kept beside the run."""
    values = {row["step"]: row["eval/SCS"] for row in metrics(runs[0]) if "eval/SCS" in row}
    assert sorted(values) == [3, 6]
    best = max(values, key=lambda step: (values[step], -step))
    params = [ocp.StandardCheckpointer().restore(
        run / "best" / "checkpoints" / str(best) / "params") for run in runs]
    for a, b in zip(*map(jax.tree.leaves, params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for run in runs:
        assert [path.name for path in (run / "best" / "checkpoints").iterdir()
                if path.name.isdigit()] == [str(best)]


def test_the_best_is_evaluated_as_a_run_is(runs, run_program, tiny_model_dir, records_file,
                                           judge_url):
    answer, = run_program("experiments.evaluate", [
        f"--checkpoint={runs[0] / 'best'}", f"--model_path={tiny_model_dir}", "--num_seeds=1",
        f"--eval_file={records_file}", f"--judge_url={judge_url}", "--max_response_tokens=12",
        "--judge_model=lexical-stand-in", "--dtype=float32",
        f"--run_dir={runs[0].parent / 'evaluated'}"])
    assert answer["status"] == 0, answer["err"]
    step = json.loads((runs[0].parent / "evaluated" / "results.json").read_text())[
        "checkpoint"]["step"]
    assert (runs[0] / "best" / "checkpoints" / str(step)).is_dir()
    assert f"step {step} of whole/best, judged by" in answer["out"]
