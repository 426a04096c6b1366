"""Distillation from end to end: resumed to the same bits, evaluated, and what is refused."""

import gzip
import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("distill")


@pytest.fixture(scope="module")
def trained(folder, tiny_model_dir, records_file, run_program):
    """GKD of an adapter in one go and in two, PG of all parameters, and what is refused."""
    (folder / "empty.txt").write_text("\n")
    (folder / "short.txt").write_text("Use each memory as its rubric says.")

    def make(run, **changes):
        values = {"run_dir": folder / run, "model_path": tiny_model_dir, "dtype": "float32",
                  "train_file": records_file, "num_prompts": 2, "group_size": 2,
                  "mini_batch_size": 4, "num_steps": STEPS, "max_response_tokens": 8,
                  "learning_rate": 0.01, "save_every": 1, "remat": "none",
                  "method": "opsd_gkd", "lora_rank": 4, "lora_alpha": 8} | changes
        return [f"--{name}={value}" for name, value in values.items()]

    cases = {
        "whole": make("whole"),
        "first": make("halves", num_steps=1),
        "other_method": make("halves", method="opsd_pg"),
        "other_teacher": make("halves", teacher_prompt_file=folder / "short.txt"),
        "second": make("halves"),
        "pg": make("pg", method="opsd_pg", lora_rank=0, mini_batch_size=2, num_steps=1,
                   learning_rate=1e-3,
                   teacher_prompt_file=folder / "short.txt"),
        "kl": make("x", kl=0.1),
        "mini_batch": make("x", mini_batch_size=3),
        "empty": make("x", teacher_prompt_file=folder / "empty.txt"),
        "absent": make("x", teacher_prompt_file=folder / "absent.txt"),
        "positions": make("x", max_response_tokens=1500),
        "skipped": make("x", max_teacher_prompt_tokens=100),
        "dry": make("x", dry_run=True),
    }
    return dict(zip(cases, run_program("experiments.train_distill", *cases.values()), strict=True))


def metrics(run_dir):
    return [{name: value for name, value in json.loads(line).items()
             if not name.startswith("time/")} for line in (run_dir / "metrics.jsonl").open()]


def test_gkd_moves_the_student(trained, folder):
    assert trained["whole"]["status"] == 0, trained["whole"]["err"]
    rows = metrics(folder / "whole")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["loss/total"] > 0 and row["loss/grad_norm"] > 0
        assert 0 < row["loss/teacher_tail"] < 1 and 0 < row["loss/student_tail"] < 1
        assert row["rollout/length_max"] <= 8
    lines = gzip.decompress((folder / "whole" / "rollouts" / "step_1.jsonl.gz").read_bytes())
    assert len(lines.splitlines()) == 4
    assert (folder / "whole" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_resumed_run_comes_to_the_same_bits(trained, folder):
    assert trained["first"]["status"] == 0, trained["first"]["err"]
    assert "resuming after step 1" in trained["second"]["out"]
    assert metrics(folder / "halves") == metrics(folder / "whole")
    for item in ("params", "state"):
        whole, halves = (ocp.StandardCheckpointer().restore(
            folder / run / "checkpoints" / str(STEPS) / item) for run in ("whole", "halves"))
        leaves = list(zip(jax.tree.leaves(whole), jax.tree.leaves(halves), strict=True))
        assert leaves
        for a, b in leaves:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for step in (1, 2):
        whole, halves = ((folder / run / "rollouts" / f"step_{step}.jsonl.gz").read_bytes()
                         for run in ("whole", "halves"))
        assert whole == halves


def test_policy_gradient_starts_at_the_reference_and_moves(trained, folder):
    assert trained["pg"]["status"] == 0, trained["pg"]["err"]
    step, = metrics(folder / "pg")
    # Of its two mini-batches, only the first meets the policy that sampled.
    assert step["loss/first_ratio_error"] <= 1e-6 < step["loss/max_ratio_error"]
    assert step["loss/grad_norm"] > 0 and step["loss/kl"] > 1e-9
    assert np.isfinite(step["distill/reverse_kl"])
    assert "teacher KL" in trained["pg"]["out"]


@pytest.mark.parametrize("case, parts", [
    ("other_method", ["--method: 'opsd_gkd' there, 'opsd_pg' now"]),
    ("other_teacher", ["--teacher_prompt_file", "--prompts_sha256"]),
    ("kl", ["--kl is of --method=opsd_pg"]),
    ("mini_batch", ["--mini_batch_size=3 must divide the step's 4 responses"]),
    ("empty", ["empty.txt is empty"]),
    ("absent", ["absent.txt cannot be read"]),
    ("positions", ["the teacher's longest prompt", "2048 positions"]),
    ("skipped", ["0 training prompts", "--num_prompts=2"]),
])
def test_what_cannot_be_is_refused_before_training(trained, case, parts):
    assert trained[case]["status"] == 2
    assert "Traceback" not in trained[case]["err"]
    for part in parts:
        assert part in trained[case]["err"]


def test_skips_are_counted_and_a_dry_run_changes_nothing(trained, folder):
    assert "skipped 4 of 4 records" in trained["skipped"]["out"]
    assert "4 training prompts, 2 steps of 2 x 2" in trained["dry"]["out"]
    assert not (folder / "x").exists()


def test_a_distilled_run_is_evaluated(trained, folder, tiny_model_dir, run_program, judge_url,
                                      records_file):
    answer, = run_program("experiments.evaluate", [
        f"--checkpoint={folder / 'pg'}", f"--model_path={tiny_model_dir}", "--num_seeds=1",
        f"--eval_file={records_file}", f"--judge_url={judge_url}", "--max_response_tokens=4",
        "--judge_model=lexical-stand-in", "--dtype=float32",
        f"--run_dir={folder / 'evaluated'}"])
    assert answer["status"] == 0, answer["err"]
    results = json.loads((folder / "evaluated" / "results.json").read_text())
    assert results["checkpoint"]["step"] == 1
