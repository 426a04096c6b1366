"""The programs that work from a run's traces, on the traces of a real run of a tiny model."""

import csv
import io
import json
import shutil

import numpy as np
import pytest
import trace_oracle

from memcalib_jax.evaluation.localization_study import LABEL_COLUMN, LABELS
from memcalib_jax.evaluation.trace import load_trace, trace_path

STEPS = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traced")


@pytest.fixture(scope="module")
def run(folder, tiny_model_dir, records_file, judge_url, run_program):
    """Two runs: one with traces, a short one without; returns the folder of the first."""
    def flags(name, **changes):
        values = {
            "run_dir": folder / name, "model_path": tiny_model_dir, "train_file": records_file,
            "judge_url": judge_url, "judge_model": "lexical-stand-in", "num_prompts": 2,
            "group_size": 4, "mini_batch_size": 8, "num_steps": STEPS, "max_response_tokens": 40,
            "dtype": "float32", "learning_rate": 3e-3, "judge_requests_per_minute": 100000,
        } | changes
        return [f"--{name}={value}" for name, value in values.items()]

    answers = run_program("experiments.train_rl", flags("run"),
                          flags("untraced", trace=False, num_steps=1))
    assert [answer["status"] for answer in answers] == [0, 0], answers
    return folder / "run"


def test_the_run_keeps_a_trace_of_each_step(run, folder):
    names = sorted(path.name for path in (run / "traces").iterdir())
    assert names == sorted(f"step_{step}.npz" for step in range(1, STEPS + 1))
    assert not (folder / "untraced" / "traces").exists()


@pytest.mark.parametrize("step", [1, STEPS])
def test_a_real_steps_advantages_can_be_recomputed(run, step):
    trace = load_trace(trace_path(run, step))
    assert trace.step == step and trace.valid_R.all() and len(trace.length_R) == 8
    advantages, multipliers, _ = trace_oracle.advantages(trace)
    np.testing.assert_allclose(trace.advantage_N, advantages, rtol=1e-5, atol=5e-5)
    assert list(multipliers) == list(np.flatnonzero(trace.localized_S)) and multipliers
    row = [json.loads(line) for line in (run / "metrics.jsonl").open()][step - 1]
    assert trace.entropy == row["loss/entropy"] and trace.rms == row["credit/rms"]
    assert row["credit/pairs_scored"] == len(trace.pair_response_S)


def test_thresholds_of_a_step_are_those_after_the_one_before(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    traces = [load_trace(trace_path(run, step)) for step in range(1, STEPS + 1)]
    assert traces[0].thresholds_C.tolist() == [np.float32(0.02)] * 9
    for row, trace in zip(rows, traces[1:]):
        assert trace.thresholds_C[4] == np.float32(row["credit/B+/threshold"])


@pytest.fixture(scope="module")
def explained(run, folder, run_program):
    cut = folder / "cut"
    shutil.copytree(run / "traces", cut / "traces")
    path = trace_path(cut, 3)
    path.write_bytes(path.read_bytes()[:-200])
    name = load_trace(trace_path(run, 3)).name(5)
    cases = {"default": [f"--run_dir={run}"],
             "named": [f"--run_dir={run}", "--step=3", f"--response={name}"],
             "unknown": [f"--run_dir={run}", "--step=3", "--response=none/7"],
             "step": [f"--run_dir={run}", f"--step={STEPS + 1}"],
             "cut": [f"--run_dir={cut}", "--step=3"],
             "untraced": [f"--run_dir={folder / 'untraced'}"]}
    return dict(zip(cases, run_program("experiments.explain", *cases.values()), strict=True))


def test_explaining_a_response(explained, run):
    trace = load_trace(trace_path(run, 3))
    assert explained["named"]["status"] == 0, explained["named"]["err"]
    assert explained["named"]["out"].startswith(f"{trace.name(5)} in step 3\n")
    assert "\x1b" not in explained["named"]["out"]
    name = trace.name(5).replace("/", "_")
    page = (run / "explanations" / f"step_3_{name}.html").read_text()
    assert page.count("<span style=") >= trace.length_R[5]
    assert trace.records[trace.record_R[5]]["question"] in page
    assert f"in step {STEPS}\n" in explained["default"]["out"]
    assert "  most:\n" in explained["default"]["out"]


@pytest.mark.parametrize("case, message", [
    ("unknown", "--response=none/7 is none of step 3's 8: "),
    ("step", f"step_{STEPS + 1}.npz cannot be read"), ("cut", "step_3.npz is cut off"),
    ("untraced", "has no trace")])
def test_mistakes_of_explaining(explained, case, message):
    assert explained[case]["status"] == 2
    assert explained[case]["err"].startswith("error: ") and message in explained[case]["err"]


@pytest.fixture(scope="module")
def drawn(run, folder, run_program):
    gap, cut = folder / "gap", folder / "cut_late"
    for copy in (gap, cut):
        shutil.copytree(run / "traces", copy / "traces")
    trace_path(gap, 4).unlink()
    path = trace_path(cut, STEPS)
    path.write_bytes(path.read_bytes()[:1000])
    cases = {"run": [f"--run_dir={run}"], "gap": [f"--run_dir={gap}"], "cut": [f"--run_dir={cut}"],
             "untraced": [f"--run_dir={folder / 'untraced'}"]}
    return dict(zip(cases, run_program("experiments.dynamics", *cases.values()), strict=True))


def read_csv(path):
    return list(csv.DictReader(io.StringIO(path.read_text("utf-8-sig"))))


def test_dynamics_agree_with_the_runs_metrics(drawn, run):
    assert drawn["run"]["status"] == 0, drawn["run"]["err"]
    steps = read_csv(run / "dynamics" / "steps.csv")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [int(row["step"]) for row in steps] == list(range(1, STEPS + 1))
    for row, measured in zip(steps, metrics, strict=True):
        for channel in ("AB-", "AC-", "BA-", "B+", "BC-", "CA-", "CB-", "C+"):
            for name, key in (("triggered", "trigger_rate"), ("non-degenerate",
                                                             "nondegenerate_groups")):
                assert float(row[f"{channel} {name}"]) == pytest.approx(
                    100 * measured[f"credit/{channel}/{key}"], abs=1e-4)
            localized = row[f"{channel} localized"]
            assert float(localized or 0) == pytest.approx(
                100 * measured[f"credit/{channel}/localized"], abs=1e-4)
        assert float(row["entropy"]) == measured["loss/entropy"]
    phases = read_csv(run / "dynamics" / "thirds.csv")
    assert [row["phase"] for row in phases] == ["early", "middle", "late", "all"]
    for name in ("3bc", "3de", "3fg"):
        picture = run / "dynamics" / f"figure_{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"left out of the reward outcomes, of {2 * STEPS} groups" in drawn["run"]["out"]


def test_a_missing_step_is_a_counted_skip(drawn, folder):
    assert drawn["gap"]["status"] == 0, drawn["gap"]["err"]
    assert "1 steps have no trace and are left out: 4\n" in drawn["gap"]["out"]
    assert len(read_csv(folder / "gap" / "dynamics" / "steps.csv")) == STEPS - 1


@pytest.mark.parametrize("case, message", [
    ("cut", f"step_{STEPS}.npz is cut off"), ("untraced", "has no trace")])
def test_mistakes_of_dynamics(drawn, folder, case, message):
    assert drawn[case]["status"] == 2
    assert drawn[case]["err"].startswith("error: ") and message in drawn[case]["err"]
    assert not (folder / "cut_late" / "dynamics").exists()


@pytest.fixture(scope="module")
def studied(run, folder, run_program):
    """A sheet drawn from the run's traces, read unfilled, with mistakes, and filled in."""
    where = folder / "study"
    def flags(name, **changes):
        return [f"--study_dir={folder / name}", *(f"--{k}={v}" for k, v in changes.items())]

    cases = {"drawn": flags("study", run_dir=run, num_pairs=3),
             "twice": flags("study", run_dir=run), "unfilled": flags("study"),
             "no_sheet": flags("nothing"), "cut": flags("nothing", run_dir=folder / "cut_late"),
             "untraced": flags("nothing", run_dir=folder / "untraced")}
    module = "experiments.localization_study"
    answers = dict(zip(cases, run_program(module, *cases.values()), strict=True))
    lines = read_csv(where / "sheet.csv")
    for name, filled in {
            "study": lines, "repeated": lines + lines[:1], "missing": lines[:-1],
            "unknown": [*lines, lines[0] | {"row": "999-1"}],
            "changed": lines}.items():
        (folder / name).mkdir(exist_ok=True)
        shutil.copy(where / "key.json", folder / name / "key.json") if name != "study" else None
        with (folder / name / "sheet.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, lines[0])
            writer.writeheader()
            writer.writerows(line | {LABEL_COLUMN: LABELS[place % 3]}
                             for place, line in enumerate(filled))
    (folder / "changed" / "key.json").write_text('[{"step": 1}]')
    names = ("study", "repeated", "missing", "unknown", "changed")
    answers |= dict(zip(names, run_program(module, *[flags(name) for name in names])))
    answers["no_case"], = run_program(module, flags("study", cases="1,999"))
    return answers


def test_the_study_of_a_run(studied, run, folder):
    assert studied["drawn"]["status"] == 0, studied["drawn"]["err"]
    assert studied["study"]["status"] == 0, studied["study"]["err"]
    results = json.loads((folder / "study" / "study.json").read_text())
    key = json.loads((folder / "study" / "key.json").read_text())
    lines = read_csv(folder / "study" / "sheet.csv")
    assert len(lines) == sum(len(pair["sentences"]) for pair in key)
    # The key's credit against the trace's own scores, and the study's means against the key.
    credit, place = [], 0
    for pair in key:
        trace = load_trace(trace_path(run, pair["step"]))
        number = trace.pair_of(trace.find(pair["response"]), pair["channel"])
        assert trace.localized_S[number]
        scores = trace_oracle.advantages(trace)[2][number]
        start = 0
        by_label = np.zeros(3)
        for sentence in pair["sentences"]:
            end = start + sentence["tokens"]
            share = scores[start:end].sum() / scores.sum()
            assert sentence["credit"] == pytest.approx(share, abs=1e-9)
            by_label[place % 3] += share
            start, place = end, place + 1
        credit.append(by_label)
    for label, mean in zip(LABELS, np.mean(credit, axis=0)):
        assert results["all"]["credit"][label]["mean"] == pytest.approx(100 * mean)
    assert results["all"]["pairs"] == len(key)
    assert (folder / "study" / "study.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "study").glob("case_*.png"))
    assert "pairs with moved credit, not 3; all are in the sheet" in studied["drawn"]["out"]


@pytest.mark.parametrize("case, message", [
    ("twice", "sheet.csv is there already"), ("unfilled", "rows without a label: 1-1"),
    ("no_sheet", "draw a sheet with --run_dir first"), ("cut", f"step_{STEPS}.npz is cut off"),
    ("untraced", "has no trace"), ("repeated", "sheet.csv: the sheet has row 1-1 twice"),
    ("missing", "sheet.csv: the sheet has 1 rows missing: "),
    ("unknown", "sheet.csv: the sheet has 1 rows that the key does not have: 999-1"),
    ("changed", "key.json has been changed"), ("no_case", "--cases: '999' is no pair")])
def test_mistakes_of_a_study(studied, folder, case, message):
    assert studied[case]["status"] == 2
    assert studied[case]["err"].startswith("error: ") and message in studied[case]["err"]
    assert not (folder / "nothing").exists()
