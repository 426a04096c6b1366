"""Which parameters are kept as the best by validation."""

import json

import jax
import numpy as np
import pytest

from memcalib_jax.data import Record
from memcalib_jax.training.checkpoint import Checkpoints
from memcalib_jax.training.rollouts import Prompt
from memcalib_jax.training.selection import BestCheckpoint

PROMPTS = [Prompt(0, Record("r", "coding", "?", (), ()), (1, 2))]
OTHERS = [Prompt(0, Record("r", "coding", "?", (), ()), (1, 3))]


def offer(folder, evaluations, prompts=PROMPTS, **options):
    """Offers (step, SCS, share valid) in turn; parameters hold the step."""
    best = BestCheckpoint(folder, prompts, **options)
    for step, value, valid in evaluations:
        values = {"eval/valid": valid} | ({} if value is None else {"eval/SCS": value})
        best.offer(step, {"w": np.full(2, step, np.float32)}, values)
    said = str(best)
    best.close()
    return said


def kept(folder):
    """Returns the steps on disk and what the parameters say."""
    checkpoints = Checkpoints(folder / "best" / "checkpoints")
    step = checkpoints.latest()
    if step is None:
        return None
    params = checkpoints.restore_params(step, {"w": jax.ShapeDtypeStruct((2,), np.float32)})
    checkpoints.close()
    names = [path.name for path in (folder / "best" / "checkpoints").iterdir()
             if path.name.isdigit()]
    assert names == [str(step)]
    return step, float(params["w"][0])


@pytest.mark.parametrize("evaluations, step", [
    ([(3, 50.0, 1.0), (6, 70.0, 1.0), (9, 60.0, 1.0)], 6),
    ([(3, 50.0, 1.0), (6, 50.0, 1.0)], 3),              # of equal ones the first
    ([(3, 50.0, 1.0), (6, 90.0, 0.4)], 3),              # too few judgments
    ([(3, None, 0.0), (6, 0.0, 0.5)], 6),               # without any judgment there is no value
])
def test_the_best_is_kept(tmp_path, evaluations, step):
    said = offer(tmp_path, evaluations)
    assert kept(tmp_path) == (step, step)
    assert f"at step {step}:" in said


def test_without_a_candidate_there_is_none(tmp_path):
    assert offer(tmp_path, [(3, 90.0, 0.2)], min_valid=0.3) == ""
    assert kept(tmp_path) is None


def test_evaluations_that_are_done_again_change_nothing(tmp_path):
    offer(tmp_path, [(3, 50.0, 1.0), (6, 70.0, 1.0), (9, 60.0, 1.0)])
    for _ in range(2):
        said = offer(tmp_path, [(6, 70.0, 1.0), (9, 60.0, 1.0)])
    assert kept(tmp_path) == (6, 6) and "70.00 at step 6" in said


def test_an_earlier_step_may_be_better(tmp_path):
    """As when a resumed run evaluates more often."""
    offer(tmp_path, [(9, 60.0, 1.0)])
    offer(tmp_path, [(8, 60.0, 1.0)])
    assert kept(tmp_path) == (8, 8)
    offer(tmp_path, [(9, 60.0, 1.0)])
    assert kept(tmp_path) == (8, 8)


def test_other_prompts_begin_anew(tmp_path):
    offer(tmp_path, [(3, 90.0, 1.0)])
    assert offer(tmp_path, [], OTHERS) == ""
    offer(tmp_path, [(3, 20.0, 1.0), (6, 10.0, 1.0)], OTHERS)
    assert kept(tmp_path) == (3, 3)
    assert "20.00 at step 3" in offer(tmp_path, [], OTHERS)


def test_the_settings_come_along(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"lora_rank": 4}))
    offer(tmp_path, [(3, 50.0, 1.0)])
    assert json.loads((tmp_path / "best" / "config.json").read_text()) == {"lora_rank": 4}
