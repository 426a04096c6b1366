"""Training on a mesh of eight devices comes to the numbers of one device."""

import os
import subprocess
import sys
from pathlib import Path


def test_every_mesh_equals_one_device(tiny_model_dir):
    """The device count must be fixed before jax starts, so this runs in a process of its own."""
    program = Path(__file__).with_name("sharded_training.py")
    process = subprocess.run(
        [sys.executable, str(program), str(tiny_model_dir)], capture_output=True, text=True,
        timeout=900, env={**os.environ, "PYTHONPATH": str(program.parents[2])})
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.count("of what was moved") == 5
