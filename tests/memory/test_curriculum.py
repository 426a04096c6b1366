"""Stages, and when to stop one."""

import json

import pytest

from memcalib_jax.memory.curriculum import PAPER, Patience, Stage, parse_stages


def test_stages():
    assert parse_stages("8:10,16:5,32:5") == PAPER
    assert parse_stages(" 2:1 , 4:3") == (Stage(2, 1), Stage(4, 3))


@pytest.mark.parametrize("text, message", [
    ("", "not ''"), ("8", "not '8'"), ("8:0", "not '8:0'"), ("8:1,", "not ''"), ("8:-1", "8:-1"),
    ("8:1:2", "8:1:2"), ("8:1,8:2", "but 8 follows 8"), ("a:b", "not 'a:b'")])
def test_bad_stages(text, message):
    with pytest.raises(ValueError, match=message):
        parse_stages(text)


def test_patience():
    patience = Patience(3)
    gains = [patience.gains(step, value) for step, value in enumerate(
        (0.2, 0.1, 0.3, 0.3, float("nan"), 0.25), start=1)]
    assert gains == [True, False, True, False, False, False]
    assert patience.best_step == 3 and patience.exhausted
    again = Patience(3)
    again.set_state(json.loads(json.dumps(patience.get_state())))
    assert again.exhausted and again.gains(7, 0.4) and not again.exhausted


def test_patience_before_any_validation():
    patience = Patience(1)
    again = Patience(1)
    again.set_state(json.loads(json.dumps(patience.get_state())))
    assert not again.exhausted and again.best_step is None and again.gains(1, 0.0)
