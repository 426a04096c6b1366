"""Experts split over devices give the values and gradients of one device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("program, said", [
    ("sharded_experts.py", "every mesh equals one device"),
    ("sharded_models.py", "every model equals itself on one device")])
def test_every_mesh_equals_one_device(tmp_path, program, said):
    """The device count must be fixed before jax starts, so this runs in a process of its own."""
    program = Path(__file__).with_name(program)
    process = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(program.parents[2])})
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.strip() == said
