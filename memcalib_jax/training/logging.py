"""A run's folder: metrics, rollouts and the line on the console."""

import gzip
import json
import os
import pathlib
import time

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


class Progress:
    """Tells on the console how far a run is, one line a step."""

    def __init__(self, first_step: int, num_steps: int):
        self._first, self._num_steps = first_step, num_steps
        self._started = time.monotonic()

    def line(self, step: int, values: dict[str, float]) -> str:
        """Returns the line after `step` of `num_steps` is done."""
        elapsed = time.monotonic() - self._started
        left = elapsed / (step - self._first) * (self._num_steps - step)
        return (
            f"step {step}/{self._num_steps}"
            f"  SCS {values['rollout/SCS']:.1f}"
            f"  Exact {values['rollout/Exact']:.1f}"
            f"  over {values['rollout/sMOS']:.1f}"
            f"  under {values['rollout/sMUS']:.1f}"
            f"  valid {100 * values['judge/valid']:.0f}%"
            f"  length {values['rollout/length_mean']:.0f}"
            f"  loss {values['loss/total']:+.4f}"
            f"  kl {values['loss/kl']:.5f}"
            f"  grad {values['loss/grad_norm']:.2f}"
            f"  {values['time/sampled_tokens_per_second']:.0f} tok/s"
            f"  {values['time/step']:.1f} s"
            f"  left {duration(left)}")


def duration(seconds: float) -> str:
    """Returns seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
