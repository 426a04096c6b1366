import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def compare(*paths):
    return subprocess.run([sys.executable, "-m", "experiments.compare", *map(str, paths)],
                          cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("names, message", [
    (["a"], "at least two results files"), (["a", "absent.json"], "absent.json: cannot be read")])
def test_mistakes_get_one_plain_message(tmp_path, names, message):
    (tmp_path / "a").write_text(json.dumps({"format": "memcalib_jax.evaluation/1"}))
    process = compare(*(tmp_path / name for name in names))
    assert process.returncode == 2
    assert process.stderr.startswith("error: ") and message in process.stderr
    assert "Traceback" not in process.stderr
