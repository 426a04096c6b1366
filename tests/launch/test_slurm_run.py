"""A Slurm job that trains, run as Slurm runs it, with a stand-in for srun on this machine."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]

# Starts two tasks with the variables of Slurm's, and answers SIGTERM as srun does: its tasks are
# killed. Its status is the highest of theirs. scancel signals tasks.
SRUN = f"""#!{sys.executable}
import os, pathlib, signal, subprocess, sys
assert sys.argv[1:3] == ["--kill-on-bad-exit=0", "--wait=300"]
tasks = [subprocess.Popen(sys.argv[3:], env=os.environ | {{
    "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": str(i), "SLURM_LOCALID": "0"}}) for i in range(2)]
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
pathlib.Path(os.environ["TASKS_PIDS"]).write_text(" ".join(str(task.pid) for task in tasks))
statuses = [task.wait() for task in tasks]
sys.exit(max(128 - status if status < 0 else status for status in statuses))
"""
SCANCEL = '#!/bin/sh\ntest "$*" = "--signal=TERM 7" && kill -TERM $(cat "$TASKS_PIDS")\n'
SCONTROL = '#!/bin/sh\nif [ "$1" = requeue ]; then echo "$*" >> "$REQUEUED"; fi\n'


def submit(folder, flags):
    """Starts the script as slurmd does: a copy that lies elsewhere, in the folder of submission."""
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    shutil.copy(ROOT / "launch" / "slurm.sbatch", folder / "slurm_script")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return subprocess.Popen(
        ["bash", folder / "slurm_script", "experiments.train_rl", *flags], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable,
            "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT), "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_PORT": str(port), "TASKS_PIDS": str(folder / "pids"),
            "REQUEUED": str(folder / "requeued"),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"})


def steps(run):
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if (
        path.exists()) else []


def test_a_job_that_runs_out_of_time_is_requeued_and_resumes(
        tmp_path, tiny_model_dir, records_file, judge_url):
    run = tmp_path / "a run"
    flags = [f"--model_path={tiny_model_dir}", f"--judge_url={judge_url}", f"--run_dir={run}",
             f"--train_file={records_file}", "--judge_model=lexical-stand-in",
             "--judge_requests_per_minute=100000", "--max_response_tokens=12", "--dtype=float32",
             "--num_prompts=2", "--group_size=2", "--mini_batch_size=4", "--method=grpo",
             "--bin_tokens=1024", "--notrace"]
    job = submit(tmp_path, [*flags, "--num_steps=500"])
    while len(steps(run)) < 2:
        assert job.poll() is None, job.communicate()
        time.sleep(0.1)
    # The script and all that it has started here are told to stop: the tasks save all the same.
    job.send_signal(signal.SIGTERM)
    for pid in subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True,
                              text=True).stdout.split():
        with contextlib.suppress(ProcessLookupError):  # it may have ended by now
            os.kill(int(pid), signal.SIGTERM)
    _, said = job.communicate(timeout=120)
    assert job.returncode == 75, said
    done = len(steps(run))
    assert f"step {done} is saved" in said and (run / "checkpoints" / str(done)).is_dir()
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"

    job = submit(tmp_path, [*flags, f"--num_steps={done + 1}"])
    printed, said = job.communicate(timeout=120)
    assert job.returncode == 0, said
    assert printed.count(f"resuming after step {done}") == 1  # one of the two talks
    assert steps(run) == list(range(1, done + 2))
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
