"""Fine-tuning from end to end: held-out loss, a kill and resume, evaluation, conversion, refusals."""

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

from memcalib_jax.data import sample_path
from memcalib_jax.models import load_config
from memcalib_jax.models.weights.peft import load_adapter

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 4

# Ends the process without any clean-up while the second checkpoint's files are being written.
KILLER = """
import os, runpy, signal
import orbax.checkpoint as ocp
wait, save, saving = ocp.CheckpointManager.wait_until_finished, ocp.CheckpointManager.save, []
def save_and_note(self, step, **kwargs):
    saving.append(step)
    return save(self, step, **kwargs)
def die_or_wait(self):
    if 2 in saving:
        os.kill(os.getpid(), signal.SIGKILL)
    wait(self)
ocp.CheckpointManager.save, ocp.CheckpointManager.wait_until_finished = save_and_note, die_or_wait
runpy.run_module("experiments.train_sft", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sft")


@pytest.fixture(scope="module")
def responses_file(folder):
    """Calibrated responses to the first four sample records, and files that are wrong."""
    lines = [json.loads(line) for line in sample_path("responses.jsonl").open()]
    rows = [{"id": line["id"], "response": line["response"]} for line in lines
            if line["variant"] == "calibrated"][:4]
    wrong = {"unknown": [*rows, {"id": "nobody", "response": "x"}], "repeated": rows + rows[1:2],
             "responses": rows}
    for name, content in wrong.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in content))
    records = sample_path("records.jsonl").read_text().splitlines(keepends=True)[:4]
    (folder / "records.jsonl").write_text("".join(records))
    return folder / "responses.jsonl"


@pytest.fixture(scope="module")
def trained(folder, tiny_model_dir, responses_file, run_program):
    """A run on the sample in one go, one killed and resumed, and what is refused, by name."""
    def make(run, **changes):
        values = {"run_dir": folder / run, "model_path": tiny_model_dir, "dtype": "float32",
                  "remat": "none", "batch_size": 12, "num_steps": STEPS, "learning_rate": 0.03,
                  "save_every": 1, "eval_every": 2, "lora_rank": 4, "lora_alpha": 8} | changes
        return [f"--{name}={value}" for name, value in values.items()]

    def files(**changes):
        return {"train_file": folder / "records.jsonl", "responses_file": responses_file,
                "batch_size": 2} | changes

    killed = subprocess.run([sys.executable, "-c", KILLER, *make("killed")], cwd=ROOT,
                            capture_output=True, text=True, timeout=300, env=os.environ)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    cases = {
        "whole": make("whole"),
        "other_rate": make("killed", learning_rate=0.01),
        "resumed": make("killed"),
        "again": make("whole"),
        "unknown": make("x", **files(responses_file=folder / "unknown.jsonl")),
        "repeated": make("x", **files(responses_file=folder / "repeated.jsonl")),
        "no_responses": make("x", train_file=folder / "records.jsonl"),
        "too_few": make("x", **files(batch_size=5)),
        "overlap": make("x", **files(eval_file=folder / "records.jsonl")),
        "fraction_of_nothing": make("x", eval_fraction=0.5),
        "files": make("x", **files(eval_fraction=0.25), dry_run=True),
        "too_long": make("x", **files(max_response_tokens=3)),
    }
    return dict(zip(cases, run_program("experiments.train_sft", *cases.values()), strict=True))


def metrics(run_dir):
    return [{name: value for name, value in json.loads(line).items()
             if not name.startswith("time/")} for line in (run_dir / "metrics.jsonl").open()]


def test_training_lowers_the_held_out_loss(trained, folder):
    assert trained["whole"]["status"] == 0, trained["whole"]["err"]
    rows = metrics(folder / "whole")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    held_out = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert len(held_out) == 3  # before, during and after
    assert held_out[0] > held_out[1] > held_out[2]
    assert held_out[0] - held_out[2] > 0.5
    assert rows[-1]["loss/total"] < rows[1]["loss/total"] - 0.5
    assert "held-out loss" in trained["whole"]["out"] and "left 0:00:00" in trained["whole"]["out"]
    assert list((folder / "whole" / "tensorboard").iterdir())


def test_a_killed_run_comes_to_the_same_bits(trained, folder):
    assert trained["resumed"]["status"] == 0, trained["resumed"]["err"]
    assert "resuming after step 1" in trained["resumed"]["out"]
    assert metrics(folder / "killed") == metrics(folder / "whole")
    for item in ("params", "state"):
        whole, killed = (ocp.StandardCheckpointer().restore(
            folder / run / "checkpoints" / str(STEPS) / item) for run in ("whole", "killed"))
        leaves = list(zip(jax.tree.leaves(whole), jax.tree.leaves(killed), strict=True))
        assert leaves
        for a, b in leaves:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert "nothing to do" in trained["again"]["out"]


def test_the_adapter_is_written(trained, folder, tiny_model_dir):
    adapter, lora = load_adapter(folder / "whole" / "adapter", load_config(tiny_model_dir))
    assert (lora.rank, lora.alpha) == (4, 8)
    assert np.any(adapter["layers"]["q_lora_b"])


@pytest.mark.parametrize("case, parts", [
    ("other_rate", ["--learning_rate: 0.03 there, 0.01 now"]),
    ("unknown", ["unknown.jsonl, line 5", "'nobody'", "none of the records"]),
    ("repeated", ["repeated.jsonl, line 5", "repeats the id of line 2"]),
    ("no_responses", ["--train_file and --responses_file go together"]),
    ("too_few", ["4 training pairs", "--batch_size=5"]),
    ("overlap", ["shares 4 records"]),
    ("fraction_of_nothing", ["--eval_fraction", "--train_file"]),
    ("too_long", ["0 training pairs", "--batch_size=2"]),
])
def test_what_cannot_be_is_refused_before_training(trained, case, parts):
    assert trained[case]["status"] == 2
    assert "Traceback" not in trained[case]["err"]
    for part in parts:
        assert part in trained[case]["err"]


def test_a_part_of_the_records_is_held_out(trained, folder):
    assert trained["files"]["status"] == 0, trained["files"]["err"]
    assert "3 training pairs, 1 held out, 4 steps of 2" in trained["files"]["out"]
    assert "skipped 4 of 4 training pairs" in trained["too_long"]["out"]
    assert not (folder / "x").exists()


def test_a_run_becomes_a_model_and_is_evaluated(trained, folder, tiny_model_dir, run_program,
                                                judge_url, records_file):
    converted, = run_program("experiments.convert", [
        f"--model_path={tiny_model_dir}", f"--checkpoint={folder / 'whole'}",
        f"--output_dir={folder / 'model'}"])
    assert converted["status"] == 0, converted["err"]
    assert load_config(folder / "model").vocab_size == load_config(tiny_model_dir).vocab_size
    evaluated, = run_program("experiments.evaluate", [
        f"--checkpoint={folder / 'whole'}", f"--model_path={tiny_model_dir}", "--num_seeds=1",
        f"--eval_file={records_file}", f"--judge_url={judge_url}", "--max_response_tokens=4",
        "--judge_model=lexical-stand-in", "--dtype=float32",
        f"--run_dir={folder / 'evaluated'}"])
    assert evaluated["status"] == 0, evaluated["err"]
    results = json.loads((folder / "evaluated" / "results.json").read_text())
    assert results["checkpoint"] == {"run": str(folder / "whole"), "step": STEPS}
