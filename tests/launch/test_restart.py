"""When a command is started again, and when that comes to an end."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

RESTART = pathlib.Path(__file__).parents[2] / "launch" / "restart.sh"

# Ends as its run folder's "statuses" say, one start a line and the last for ever, negative by a
# signal; saves a checkpoint where "saves" is there.
PROGRAM = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1].removeprefix("--run_dir="))
starts = folder / "starts"
count = int(starts.read_text()) if starts.exists() else 0
starts.write_text(str(count + 1))
if (folder / "saves").exists():
    (folder / "checkpoints" / str(10 * count + 10)).mkdir(parents=True)
statuses = [int(line) for line in (folder / "statuses").read_text().split()]
status = statuses[min(count, len(statuses) - 1)]
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


def restart(folder, statuses, *more, saves=True, options=(), **variables):
    """Runs restart.sh around the program; returns the result and how often that was started."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "statuses").write_text(" ".join(map(str, statuses)))
    if saves:
        (folder / "saves").touch()
    result = subprocess.run(
        ["bash", RESTART, *options, sys.executable, folder / "program.py", f"--run_dir={folder}",
         *more], capture_output=True, text=True, timeout=60,
        env=os.environ | {"RESTART_SECONDS": "0", "RESTART_NAME": "test"} | variables)
    return result, int((folder / "starts").read_text())


@pytest.mark.parametrize("statuses, ends, count", [
    ([75, 75, 0], 0, 3),                        # preempted twice
    ([-signal.SIGKILL, -signal.SIGABRT, 0], 0, 3),
    ([2], 2, 1), ([1], 1, 1), ([3], 3, 1), ([130], 130, 1), ([0], 0, 1),
    ([75, 2], 2, 2)])
def test_what_is_started_again(tmp_path, statuses, ends, count):
    result, starts = restart(tmp_path, statuses)
    assert (result.returncode, starts) == (ends, count)
    assert not (tmp_path / "restarts" / "test").exists()


def test_one_of_several_processes_starts_again_when_another_failed(tmp_path):
    result, starts = restart(tmp_path, [1, 1, 0], "--multihost")
    assert (result.returncode, starts) == (0, 3)


def test_it_gives_up_without_progress(tmp_path):
    result, starts = restart(tmp_path, [75], saves=False, RESTARTS_WITHOUT_PROGRESS="3")
    assert (result.returncode, starts) == (1, 3)
    assert result.stderr.splitlines()[-1] == (
        f"error: 3 starts in a row saved no checkpoint in {tmp_path}; the last ended with status 75")


def test_progress_begins_the_count_anew(tmp_path):
    # Seven starts in all, of which no two in a row save nothing.
    result, starts = restart(tmp_path, [75] * 6 + [0], RESTARTS_WITHOUT_PROGRESS="2")
    assert (result.returncode, starts) == (0, 7)


def test_a_half_written_checkpoint_is_no_progress(tmp_path):
    (tmp_path / "checkpoints" / "30").mkdir(parents=True)
    (tmp_path / "checkpoints" / "60.orbax-checkpoint-tmp").mkdir()
    step = subprocess.run(["bash", RESTART, "--saved_step", tmp_path], capture_output=True, text=True)
    assert step.stdout == "30\n"


def test_the_steps_of_stages_add_up(tmp_path):
    for name in ("stage_1/checkpoints/25", "stage_2/checkpoints/5", "stage_2/checkpoints/010"):
        (tmp_path / name).mkdir(parents=True)
    step = subprocess.run(["bash", RESTART, "--saved_step", tmp_path], capture_output=True, text=True)
    assert step.stdout == "35\n"


def test_a_scheduler_starts_again_and_the_starts_are_counted_over_its_jobs(tmp_path):
    ended = []
    for _ in range(3):
        result, starts = restart(tmp_path, [-signal.SIGKILL], saves=False, options=["--once"],
                                 RESTARTS_WITHOUT_PROGRESS="3")
        ended.append((result.returncode, starts))
    assert ended == [(75, 1), (75, 2), (1, 3)]
    assert "3 starts in a row saved no checkpoint" in result.stderr
    # Whoever starts it by hand after that begins anew.
    result, starts = restart(tmp_path, [75], saves=False, options=["--once"])
    assert (result.returncode, starts) == (75, 4)


def test_a_start_that_was_cut_off_with_its_machine_counts(tmp_path):
    (tmp_path / "restarts").mkdir()
    (tmp_path / "restarts" / "test").write_text("0 5\n")
    (tmp_path / "starts").write_text("5")
    result, starts = restart(tmp_path, [75], options=["--once"])
    assert (result.returncode, starts) == (1, 5) and "was cut off" in result.stderr


def test_dry_run_prints_the_command_and_leaves_nothing(tmp_path):
    result = subprocess.run(
        ["bash", RESTART, "--dry_run", "program", f"--run_dir={tmp_path}/a b"],
        capture_output=True, text=True)
    assert result.stdout == f"program --run_dir={tmp_path}/a\\ b \n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_loop_reaches_the_command(sent, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1].removeprefix("--run_dir="))
def stop(*_):
    time.sleep(0.5)
    (folder / "saved").write_text("")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
(folder / "ready").write_text("")
while True:
    time.sleep(0.05)
""")
    # As at a terminal: a program started in the background would be deaf to SIGINT.
    hearing = ("import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
               "os.execvp(sys.argv[1], sys.argv[1:])")
    with subprocess.Popen([sys.executable, "-c", hearing, "bash", RESTART, sys.executable, program,
                           f"--run_dir={tmp_path}"]) as loop:
        while not (tmp_path / "ready").exists():
            assert loop.poll() is None
            time.sleep(0.02)
        loop.send_signal(sent)
        assert loop.wait(timeout=30) == 75
    assert (tmp_path / "saved").exists()
