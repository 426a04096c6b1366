"""Several processes on this machine train and evaluate as one does, and end together."""

import gzip
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = ["--num_prompts=2", "--group_size=3", "--mini_batch_size=3", "--learning_rate=1e-3",
         "--save_every=2", "--eval_every=3"]


class Programs:
    """Starts programs of one or more processes, all with the same model, records and judge."""

    def __init__(self, folder, model, records, judge_url):
        self.folder = folder
        self._flags = [
            f"--model_path={model}", f"--judge_url={judge_url}", f"--eval_file={records}",
            "--judge_model=lexical-stand-in", "--judge_requests_per_minute=100000",
            "--max_response_tokens=12", "--dtype=float32"]
        self._env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
                                  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def start(self, program, run_dir, count, *more):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        joined = [[f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}",
                   f"--process_id={i}"] if count > 1 else [] for i in range(count)]
        return [subprocess.Popen(
            [sys.executable, "-m", f"experiments.{program}", f"--run_dir={run_dir}",
             *self._flags, *flags, *more], cwd=ROOT, text=True, env=self._env,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE) for flags in joined]

    def run(self, *args):
        started = self.start(*args)
        said = [process.communicate(timeout=300) for process in started]
        assert [process.returncode for process in started] == [0] * len(started), said
        return [out for out, _ in said]


@pytest.fixture(scope="module")
def programs(tmp_path_factory, tiny_model_dir, records_file, judge_url):
    return Programs(tmp_path_factory.mktemp("processes"), tiny_model_dir, records_file, judge_url)


@pytest.fixture(scope="module")
def train_flags(records_file):
    return [*TRAIN, f"--train_file={records_file}"]


@pytest.fixture(scope="module")
def trained(programs, train_flags):
    """Folders of the same run by one process and by two, and what the two printed."""
    alone, shared = programs.folder / "alone", programs.folder / "shared"
    programs.run("train_rl", alone, 1, "--num_steps=3", *train_flags)
    return alone, shared, programs.run("train_rl", shared, 2, "--num_steps=3", *train_flags)


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rollouts(run, step):
    text = gzip.decompress((run / "rollouts" / f"step_{step}.jsonl.gz").read_bytes())
    return [json.loads(line) for line in text.splitlines()]


def judged(path):
    return [(row["id"], row["sample"]) for row in map(json.loads, path.read_text().splitlines())]


def test_two_processes_come_to_the_numbers_of_one(trained):
    alone, shared, _ = trained
    for one, two in zip(rows(alone), rows(shared), strict=True):
        compared = [name for name in one if not name.startswith(("time/", "judge/"))
                    and name != "credit/padded_tokens"]  # each device has a bin of its own
        assert len(compared) > 60
        for name in compared:
            assert two[name] == pytest.approx(one[name], rel=2e-4, abs=2e-5), name
    for step in (1, 2, 3):
        assert ([row["tokens"] for row in rollouts(alone, step)]
                == [row["tokens"] for row in rollouts(shared, step)])


def test_each_process_judges_its_share_and_one_talks(trained):
    _, shared, said = trained
    mine, others = (judged(shared / "judgments" / f"step_1{part}.jsonl")
                    for part in ("", ".process_1"))
    assert len({name for name, _ in mine}) == len({name for name, _ in others}) == 1
    assert sorted(mine + others) == sorted(
        (row["id"], row["sample"]) for row in rollouts(shared, 1))
    assert "step 3/3" in said[0] and "step" not in said[1]


def test_evaluations_are_equal(programs, trained):
    results = []
    for count in (1, 2):
        folder = programs.folder / f"evaluated_{count}"
        programs.run("evaluate", folder, count, "--num_seeds=2", f"--checkpoint={trained[1]}")
        results.append(json.loads((folder / "results.json").read_text()))
    for name in ("records", "seeds", "overall", "by_domain", "channels"):
        assert results[0][name] == results[1][name], name


@pytest.mark.parametrize("sent, statuses", [(signal.SIGKILL, {1, -signal.SIGABRT}),
                                            (signal.SIGTERM, {75})])
def test_they_end_together_and_go_on_as_one(sent, statuses, programs, train_flags, trained):
    folder = programs.folder / sent.name
    main, other = programs.start("train_rl", folder, 2, "--num_steps=500", *train_flags)
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert main.poll() is None, main.communicate()
        time.sleep(0.1)
    other.send_signal(sent)
    _, said = main.communicate(timeout=60)
    assert main.returncode in statuses
    assert ("is saved" if sent == signal.SIGTERM else "error: this process failed") in said
    assert other.wait(timeout=60) == (75 if sent == signal.SIGTERM else -sent)
    done = len(rows(folder))
    programs.run("train_rl", folder, 1, f"--num_steps={done + 1}", *train_flags)
    for one, resumed in zip(rows(trained[0])[:2], rows(folder)):
        assert resumed["rollout/SCS"] == one["rollout/SCS"]
        assert resumed["loss/total"] == pytest.approx(one["loss/total"], rel=2e-4, abs=2e-5)
    assert [row["step"] for row in rows(folder)] == list(range(1, done + 2))
