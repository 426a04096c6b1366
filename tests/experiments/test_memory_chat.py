"""`python -m experiments.memory_chat`: sessions in, memories kept, questions answered."""

import pathlib
import subprocess
import sys

import pytest

from memcalib_jax.memory.stand_in import MODEL_NAME, serve

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def endpoint():
    with serve() as server:
        yield server.base_url


@pytest.fixture
def talk(tiny_model_dir, endpoint, tmp_path):
    def run(lines, *flags):
        return subprocess.run(
            [sys.executable, "-m", "experiments.memory_chat", f"--model_path={tiny_model_dir}",
             f"--run_dir={tmp_path / 'run'}", "--encoder=words", "--num_chunks=1",
             "--max_prompt_tokens=1500", "--max_response_tokens=16", "--answer_max_tokens=8",
             f"--pipeline_url={endpoint}", f"--pipeline_model={MODEL_NAME}", f"--answer_url={endpoint}",
             f"--answer_model={MODEL_NAME}", *flags],
            cwd=ROOT, capture_output=True, text=True, input="\n".join(lines), timeout=300)
    return run


def test_what_is_said_is_kept_and_asked_about(talk):
    done = talk(["/bank", "/end", "/next", "Ann: I like tea.", "Ben: I like rowing.",
                 "Cem: Me too.", "/end", "/bank", "/ask Who likes tea?", "/ask"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1:4] == ["nothing is remembered yet", "nothing was said in this session",
                          "/next needs a --conversation"]
    assert lines[4].endswith("speakers are Ann and Ben")
    assert lines[5] == "session 1: 2 turns read; 2 memories (2 x bank/inserted, 2 x end/stop)"
    assert lines[6].endswith("I like tea.  (D1:1)") and lines[7].endswith("I like rowing.  (D1:2)")
    assert lines[8:10] == ["I like tea.", "  memories read rest on: D1:1"]
    again = talk(["/ask Who likes tea?", "Ben: And figs.", "/end"])
    assert again.stdout.startswith("2 memories;") and "I like tea." in again.stdout
    assert "session 2: 1 turns read; 3 memories" in again.stdout
    other = talk(["/bank"], "--speakers=Ann,Cem")
    assert other.returncode == 2 and "is of Ann and Ben: give the same speakers" in other.stderr


def test_a_conversations_sessions_one_after_the_other(talk):
    done = talk(["/next", "Odile: One more.", "/next", "/end", "/next"],
                "--conversation=smp-conv-1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("session 1: 10 turns read; 10 memories")
    assert lines[2] == "a session has begun; /end it first"
    assert lines[3].startswith("session 2: 1 turns read; 11 memories")


@pytest.mark.parametrize("flags, message", [
    (["--conversation=nobody"], "--conversation: there is no 'nobody'"),
    (["--speakers=Ann"], "--speakers must be two different names")])
def test_mistakes_are_told_plainly(talk, flags, message):
    done = talk([], *flags)
    assert done.returncode == 2 and message in done.stderr
