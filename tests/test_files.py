"""Files that are there whole or not at all."""

import signal
import subprocess
import sys

from memcalib_jax.files import write_atomically

# Is killed when its file is written and has not got its name.
KILLED = """
import os, pathlib, signal, sys
from memcalib_jax import files
files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
files.write_atomically(pathlib.Path(sys.argv[1]), b"half of it")
"""


def test_what_a_killed_writer_left_goes_when_the_file_is_written_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    killed = subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not path.exists()
    write_atomically(path, b"whole")
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
    assert path.read_bytes() == b"whole"
