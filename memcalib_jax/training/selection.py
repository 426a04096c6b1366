"""Selection by validation (4.1, arXiv 2609.24259): the best evaluation's parameters are kept."""

import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence

from memcalib_jax.files import write_atomically
from memcalib_jax.parallel import multihost
from memcalib_jax.training.checkpoint import Checkpoints
from memcalib_jax.training.rollouts import Prompt

METRIC = "SCS"


class BestCheckpoint:
    """Keeps the parameters with the highest validation SCS in `best/`; of equal ones the first.

    `best/` is laid out like a run's folder, so that what reads a run's newest checkpoint reads the
    best one there. It is a function of the evaluations alone: a run that was killed does some of
    them again and comes to the same choice.

    Args:
      run_dir: the run's folder.
      eval_prompts: what evaluations are on. What was chosen on other prompts is given up.
      min_valid: evaluations with a lower share of valid judgments are no candidates.
    """

    def __init__(self, run_dir: pathlib.Path, eval_prompts: Sequence[Prompt], *,
                 min_valid: float = 0.5):
        self._run_dir, self._min_valid = run_dir, min_valid
        named = [(prompt.record.id, prompt.tokens) for prompt in eval_prompts]
        self._prompts = hashlib.sha256(json.dumps(named).encode()).hexdigest()
        self._checkpoints = Checkpoints(run_dir / "best" / "checkpoints", keep=1)
        self._step = self._checkpoints.latest()
        self._value = self._read(self._step)

    def _read(self, step):
        """Returns the value of the kept checkpoint; None where it is not to be compared with."""
        if step is None:
            return None
        kept = self._checkpoints.restore_data(step)
        return kept[METRIC] if kept["eval_prompts_sha256"] == self._prompts else None

    def offer(self, step: int, params: dict, values: Mapping[str, float]):
        """Keeps the parameters if no evaluation was better.

        Args:
          step: theirs.
          params: what is trained.
          values: the evaluation's metrics, under `eval/`.
        """
        value = values.get(f"eval/{METRIC}")
        if value is None or values["eval/valid"] < self._min_valid:
            return
        if self._value is not None and (value, -step) <= (self._value, -self._step):
            return
        config = self._run_dir / "config.json"
        if multihost.is_main() and config.exists():
            write_atomically(self._run_dir / "best" / "config.json", config.read_bytes())
        if self._step is not None and self._step >= step:
            # The newest one is taken for the best. Steps after this one are done again.
            self._checkpoints.delete(self._step)
        self._checkpoints.save_params(step, params, {
            METRIC: value, "eval_prompts_sha256": self._prompts})
        self._step, self._value = step, value

    def __str__(self):
        """Says what was chosen; nothing where there was no candidate."""
        if self._value is None:
            return ""
        return (f"best validation {METRIC} {self._value:.2f} at step {self._step}: its parameters "
                f"are in {self._run_dir / 'best'}")

    def close(self):
        """Ends the manager's threads."""
        self._checkpoints.close()
