"""The program that trains memory building, on a tiny random model."""

import json
import shutil

import numpy as np
import pytest

FLAGS = ["--encoder=words", "--stages=1:1,2:2", "--num_chunks=2", "--num_trajectories=3",
         "--local_fraction=1", "--num_rerolls=2", "--max_prompt_tokens=1500",
         "--max_response_tokens=24", "--answer_max_tokens=16", "--terminal_questions=2",
         "--local_questions=2", "--num_mini_batches=2", "--bin_tokens=4096", "--eval_sessions=1",
         "--eval_every=1", "--save_every=1", "--dtype=float32", "--learning_rate=1e-3"]


def metrics_of(run_dir, stage):
    lines = (run_dir / stage / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items()
             if not k.startswith(("time/", "compile"))} for line in lines]


@pytest.fixture(scope="module")
def run(tiny_model_dir, run_program, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("memory") / "run"
    answer, = run_program("experiments.train_memory", [
        *FLAGS, f"--model_path={tiny_model_dir}", f"--run_dir={run_dir}",
        "--compilation_cache_dir=" + str(run_dir.parent / "programs")])
    assert answer["status"] in (0, None), answer["err"]
    return run_dir, answer["out"]


def test_every_stage_trains_and_keeps_its_best(run):
    run_dir, out = run
    assert "stage 1/2: 1 sessions" in out and "stage 2/2: 2 sessions" in out
    first, second = metrics_of(run_dir, "stage_01"), metrics_of(run_dir, "stage_02")
    assert [m["step"] for m in first] == [1] and [m["step"] for m in second] == [1, 2]
    for values in first + second:
        assert values["loss/first_ratio_error"] < 1e-4
        assert values["memory/valid"] == 1 and values["memory/failed"] == 0
        assert np.isfinite(values["loss/total"]) and 0 <= values["eval/failure"] <= 1
    # Two conversations, one or two sessions, two rerolls of each.
    assert first[0]["memory/rerolled"] == 4 and second[0]["memory/rerolled"] == 8
    assert first[0]["sampler/prefill_share"] < 1
    for stage in ("stage_01", "stage_02"):
        assert any((run_dir / stage / "best" / "checkpoints").iterdir())
        assert any((run_dir / stage / "rollouts").iterdir())


def test_a_stage_that_is_done_again_comes_to_the_same_numbers(run, tiny_model_dir, run_program,
                                                              tmp_path):
    run_dir, _ = run
    again = tmp_path / "again"
    shutil.copytree(run_dir, again)
    shutil.rmtree(again / "stage_02" / "checkpoints" / "2")
    answer, = run_program("experiments.train_memory", [
        *FLAGS, f"--model_path={tiny_model_dir}", f"--run_dir={again}",
        "--compilation_cache_dir=" + str(run_dir.parent / "programs")])
    assert answer["status"] in (0, None), answer["err"]
    assert "the run has its 1 steps already" in answer["out"]
    assert "resuming after step 1" in answer["out"]
    assert metrics_of(again, "stage_02") == metrics_of(run_dir, "stage_02")


@pytest.mark.parametrize("flags, message", [
    (["--stages=4:1,2:1"], "--stages: each stage must have more sessions"),
    (["--stages=4"], "--stages: a stage is SESSIONS:STEPS"),
    (["--train_ids=smp-conv-9"], "--train_ids: there is no conversation 'smp-conv-9'"),
    (["--train_ids=smp-conv-3"], "is in the parts train and validation"),
    (["--train_ids="], "nothing to train on"),
    (["--merged_role", "--trained_roles=manage"], "--trained_roles names roles"),
    (["--max_prompt_tokens=100"], "the instructions of extract alone have"),
    (["--max_prompt_tokens=4000"], "exceed the model's 2048 positions together"),
    (["--answer_url=http://127.0.0.1:1/v1"], "--answer_url and --answer_model go together"),
    (["--embedding_url=http://127.0.0.1:1/v1"], "--embedding_url and --embedding_model go toge"),
    (["--embedding_url=http://127.0.0.1:1/v1", "--embedding_model=m"],
     "--embedding_url and --encoder exclude each other"),
    (["--conversations_file=missing.json"], "missing.json cannot be read"),
    (["--prompts_dir=."], "--prompts_dir: "),
    (["--encoder=."], "--encoder: . lacks config.json")])
def test_mistakes_are_told_plainly(flags, message, answers):
    answer = answers[tuple(flags)]
    assert answer["status"] == 2 and message in answer["err"], answer["err"]
    assert "Traceback" not in answer["err"]


@pytest.fixture(scope="module")
def answers(tiny_model_dir, run_program, tmp_path_factory):
    cases = next(mark for mark in test_mistakes_are_told_plainly.pytestmark).args[1]
    run_dir = tmp_path_factory.mktemp("mistakes") / "run"
    common = [*FLAGS, f"--model_path={tiny_model_dir}", f"--run_dir={run_dir}",
              "--compilation_cache_dir=" + str(run_dir.parent / "programs"), "--dry_run"]
    got = run_program("experiments.train_memory", *[[*common, *flags] for flags, _ in cases])
    return {tuple(flags): answer for (flags, _), answer in zip(cases, got)}
