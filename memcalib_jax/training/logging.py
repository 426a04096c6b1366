"""A run's folder: metrics and rollouts."""

import gzip
import json
import os
import pathlib

import tensorboardX

from memcalib_jax.files import write_atomically


class RunLog:
    """Writes a step's metrics to `metrics.jsonl` and TensorBoard, and its rollouts.

    On resume the metrics are cut back to the checkpoint's step, since later steps are done again.
    """

    def __init__(self, run_dir: pathlib.Path, *, start_step: int):
        self._run_dir = run_dir
        self._path = run_dir / "metrics.jsonl"
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        kept = [line for line in lines if _step_of(line) <= start_step]
        write_atomically(self._path, b"".join(line + b"\n" for line in kept))
        self._file = self._path.open("a", encoding="utf-8")
        self._board = tensorboardX.SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=start_step + 1 if start_step else None)

    def metrics(self, step: int, values: dict[str, float]):
        """Appends one object with key `step`."""
        row = {"step": step} | {name: values[name] for name in sorted(values)}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        for name, value in values.items():
            self._board.add_scalar(name.replace("+", "_"), value, step)  # no plus in its names
        self._board.flush()

    def rollouts(self, step: int, rows: list[dict]):
        """Writes a step's rollouts, one object a response, compressed."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(self._run_dir / "rollouts" / f"step_{step}.jsonl.gz",
                         gzip.compress(text.encode(), mtime=0))

    def close(self):
        """Closes the files."""
        self._file.close()
        self._board.close()


def _step_of(line: bytes) -> float:
    """Returns a line's step; a line that was cut off comes after every step."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def duration(seconds: float) -> str:
    """Returns seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
