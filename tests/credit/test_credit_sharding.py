"""The device count must be fixed before jax starts, so this runs in a process of its own."""

import os
import pathlib
import subprocess
import sys


def test_four_devices_give_the_numbers_of_one():
    program = pathlib.Path(__file__).with_name("sharded_program.py")
    root = program.parents[2]
    result = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == "sharded equals whole"
