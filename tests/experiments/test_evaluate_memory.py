"""The programs that evaluate memories and train the answer agent, on a tiny random model."""

import json

import pytest

from memcalib_jax.memory.stand_in import MODEL_NAME, serve

FLAGS = ["--encoder=words", "--num_chunks=1", "--max_sessions=1", "--max_prompt_tokens=1500",
         "--max_response_tokens=16", "--answer_max_tokens=8", "--dtype=float32"]


@pytest.fixture(scope="module")
def base(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluations")
    return folder, [*FLAGS, f"--model_path={tiny_model_dir}",
                    f"--compilation_cache_dir={folder / 'programs'}"]


@pytest.fixture(scope="module")
def endpoint():
    with serve() as server:
        yield server.base_url


def pipeline(url):
    return [f"--{name}_{what}" for name in ("pipeline", "answer", "judge")
            for what in (f"url={url}", f"model={MODEL_NAME}")]


@pytest.fixture(scope="module")
def evaluations(base, endpoint, run_program):
    folder, flags = base
    runs = {
        "local": ["--num_seeds=2", "--temperature=1"],
        "raw": ["--method=raw_turns", f"--answer_url={endpoint}", f"--answer_model={MODEL_NAME}"],
        "full": ["--method=full_context", f"--answer_url={endpoint}", f"--answer_model={MODEL_NAME}"],
        "endpoint": [*pipeline(endpoint), "--part=train", "--train_ids=smp-conv-1"],
    }
    answers = run_program("experiments.evaluate_memory", *[
        [*flags, f"--run_dir={folder / name}", *more] for name, more in runs.items()])
    for name, answer in zip(runs, answers):
        assert answer["status"] in (0, None), (name, answer["err"])
    return {name: (folder / name, json.loads((folder / name / "results.json").read_text()),
                   answer["out"]) for name, answer in zip(runs, answers)}


def test_an_endpoints_pipeline_is_scored_as_its_answers_are(evaluations):
    folder, results, out = evaluations["endpoint"]
    values = results["summary"]["all"]
    assert values["m_fail"]["mean"] == 0 and values["judge"]["mean"] > 0
    rows = [json.loads(line) for line in
            (folder / "seed_0" / "answers.jsonl").read_text().splitlines()]
    answer, = [row for row in rows if "allergic" in row["question"]]
    assert "I'm allergic to walnuts" in answer["answer"] and answer["right"]
    assert 0 < answer["f1"] < 1 and answer["tagged"]
    assert values["f1"]["mean"] == pytest.approx(100 * sum(row["f1"] for row in rows) / len(rows))
    assert results["growth"]["1"]["entries"]["mean"] == 10
    assert results["counts"] == {"end/stop": 2, "bank/inserted": 10}
    assert results["tokens"] is None and results["seconds"]["mean"] > 0
    assert results["untagged"]["mean"] == 0
    assert "| all |" in out and (folder / "results.md").is_file()
    assert list(json.loads((folder / "seed_0" / "banks.json").read_text())) == ["smp-conv-1"]


def test_baselines_lack_no_evidence_and_take_no_time(evaluations):
    for name in ("raw", "full"):
        _, results, _ = evaluations[name]
        assert results["summary"]["all"]["m_fail"]["mean"] == 0
        assert results["seconds"] is None and results["growth"] == {}
    # What is not retrieved cannot be used; the whole conversation is always read.
    assert evaluations["full"][1]["summary"]["all"]["retrieval_failure"]["mean"] == 0


def test_a_local_model_over_two_seeds(evaluations):
    folder, results, _ = evaluations["local"]
    assert results["seeds"] == 2 and results["summary"]["all"]["f1"]["std"] is not None
    assert 0 < results["tokens"]["longest"]["mean"] <= 16
    assert sum(n for name, n in results["counts"].items() if name[:4] == "end/") in range(2, 5)
    banks = [(folder / f"seed_{seed}" / "banks.json").is_file() for seed in range(2)]
    assert banks == [True, True]


def test_what_is_done_is_not_done_again(evaluations, base, run_program):
    folder, flags = base
    before = (folder / "local" / "seed_0" / "results.json").stat().st_mtime_ns
    answer, = run_program("experiments.evaluate_memory", [
        *flags, f"--run_dir={folder / 'local'}", "--num_seeds=2", "--temperature=1"])
    assert answer["status"] in (0, None) and "seed 0:" not in answer["out"]
    assert (folder / "local" / "seed_0" / "results.json").stat().st_mtime_ns == before


MISTAKES = [
    (["--num_seeds=2"], "--num_seeds over 1 needs a --temperature"),
    (["--method=raw_turns", "--num_seeds=2"], "is the same for every seed"),
    (["--method=full_context", "--checkpoint=x"], "builds no memory"),
    (["--pipeline_url=http://127.0.0.1:1/v1"], "--pipeline_url and --pipeline_model go together"),
    (["--judge_model=m"], "--judge_url and --judge_model go together"),
    (["--checkpoint=missing"], "--checkpoint=missing holds no whole checkpoint"),
    (["--test_ids="], "nothing to test on"),
    (["--conversations_file=missing.json", "--format=membench"], "there is no such file")]


def test_mistakes_are_told_plainly(base, run_program):
    folder, flags = base
    answers = run_program("experiments.evaluate_memory", *[
        [*flags, f"--run_dir={folder / 'mistakes'}", "--dry_run", *more] for more, _ in MISTAKES])
    for (more, message), answer in zip(MISTAKES, answers):
        assert answer["status"] == 2 and message in answer["err"], (more, answer)
        assert "Traceback" not in answer["err"]


def test_the_answer_agent_trains_on_gold_and_on_an_endpoints_memories(base, endpoint, run_program):
    folder, flags = base
    flags = [flag for flag in flags if not flag.startswith("--max_sessions")] + [
        "--num_prompts=2", "--group_size=2", "--num_mini_batches=1", "--num_steps=1",
        "--bin_tokens=2048", "--top_k=2"]
    gold = folder / "gold"
    trained, *mistakes = run_program(
        "experiments.train_answer",
        [*flags, f"--run_dir={gold}", "--gold_banks"],
        [*flags, f"--run_dir={folder / 'few'}", f"--pipeline_url={endpoint}",
         f"--pipeline_model={MODEL_NAME}", "--least_f1=1"],
        [*flags, f"--run_dir={folder / 'none'}"],
        [*flags, f"--run_dir={folder / 'lost'}", "--traces_file=missing.jsonl"])
    assert trained["status"] in (0, None), trained["err"]
    first, last = map(json.loads, (gold / "metrics.jsonl").read_text().splitlines())
    assert first["step"] == 0 and last.keys() >= {"rollout/f1", "eval/f1", "loss/total"}
    assert len((gold / "traces.jsonl").read_text().splitlines()) == 36
    assert "32 questions to train on, 4 held out, 1 steps" in trained["out"]
    # The stand-in says whole memories: none is the answer alone.
    assert "kept 0 of 36 questions" in mistakes[0]["out"]
    for answer, message in zip(mistakes, (
            "0 traces cannot be split", "give one source of questions", "does not exist")):
        assert answer["status"] == 2 and message in answer["err"], answer


def test_finished_runs_side_by_side(evaluations, run_program, tmp_path):
    stage = tmp_path / "training" / "stage_08"
    stage.mkdir(parents=True)
    (stage / "metrics.jsonl").write_text('{"step": 1, "eval/f1": 0.2, "memory/entries": 4}\n')
    raw, full, other = (evaluations[name][0] for name in ("raw", "full", "endpoint"))
    out = tmp_path / "out"
    good, *bad = run_program(
        "experiments.memory_tables",
        [f"--output_dir={out}", f"--runs=raw={raw},full={full}", f"--sweep=0.1={raw},0.3={full}",
         f"--trainings=t={stage.parent}"],
        [f"--output_dir={out}"],
        [f"--output_dir={out}", f"--runs=raw={raw},endpoint={other}"],
        [f"--output_dir={out}", f"--runs={raw}"],
        [f"--output_dir={out}", f"--runs=raw={tmp_path}"],
        [f"--output_dir={out}", f"--sweep=raw={raw}"],
        [f"--output_dir={out}", f"--trainings=t={raw}"])
    assert good["status"] in (0, None), good["err"]
    assert {path.name for path in out.iterdir()} == {
        "memory.md", "scores.png", "cost.png", "training.png", "sweep.png"}
    assert "| raw |" in good["out"] and "| full |" in good["out"]
    for answer, message in zip(bad, (
            "nothing to show", "endpoint and raw asked different questions", "must be NAME=DIR",
            "cannot be read", "must be the setting's value", "holds no stage with metrics")):
        assert answer["status"] == 2 and message in answer["err"], answer
