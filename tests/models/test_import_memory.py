"""The host memory of an import: the parameters, and at most one weights file besides."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype, devices", [("bfloat16", 1), ("float32", 2)])
def test_an_import_takes_little_besides_the_parameters(dtype, devices):
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.import_memory", "--megabytes=60", f"--dtypes={dtype}",
         f"--devices={devices}"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    row, = json.loads(process.stdout.splitlines()[-1])["rows"]
    assert row["result"] == pytest.approx(120 if dtype == "float32" else 60, rel=0.05)
    # Of what was freed before, little is taken again, so that the peak has seen the parameters.
    assert 0.9 * row["result"] < row["peak"] < row["result"] + row["largest_shard"] + 3
