"""LoGo-GRPO against GRPO where the cause of each failure is known."""

import numpy as np
import pytest

from memcalib_jax.synthetic.memory_game import Move, draw_game
from memcalib_jax.synthetic.memory_study import (
    Row, StudyConfig, advantages_of, collect, compare_signs, sign_counts, train)


def row(group, reward, caused, others, session, local=False):
    return Row(group, Move((0,), (0,)), reward, caused, others, (0, session), local)


def test_signs_by_hand():
    # Session 1: one row caused 2 failures (one of others) at -1, one caused 1 at +1.
    rows = [row(0, 0, 2, 1, 1), row(0, 1, 1, 1, 1), row(1, 0, 0, 0, 2)]
    advantages = np.array([-1.0, 1.0, -1.0])
    counts = sign_counts(rows, advantages, of_others=False)
    assert (counts.rows, counts.right_rows, counts.sessions, counts.right_sessions) == (2, 1, 1, 1)
    counts = sign_counts(rows, advantages, of_others=True)  # -1 + 1 is no blame
    assert (counts.rows, counts.right_rows, counts.sessions, counts.right_sessions) == (2, 1, 1, 0)
    assert (counts.row_rate, counts.session_rate) == (0.5, 0.0)


def test_groups_are_sessions_of_a_game_and_rerolls_of_one_bank():
    games = [draw_game(np.random.default_rng(seed)) for seed in (0, 1)]
    config = StudyConfig(trajectories=5, rerolls=3, local_fraction=1.0)
    rows = collect(np.zeros((3, 3)), games, config, np.random.default_rng(2))
    assert len(rows) == 2 * 8 * (5 + 3)
    for group in {row.group for row in rows}:
        members = [row for row in rows if row.group == group]
        assert len({(row.session, row.local) for row in members}) == 1
        assert len(members) == (3 if members[0].local else 5)
        if members[0].local:  # One bank: the first fact is met in one context.
            assert len({row.move.contexts[0] for row in members}) == 1
    advantages = advantages_of(rows, len(rows) + 7)
    assert len(advantages) == len(rows)
    assert sum(advantages) == pytest.approx(0, abs=1e-3)


def test_rerolls_put_the_right_sign_on_the_session_that_did_the_damage():
    of_others = compare_signs(30, StudyConfig(), 1, of_others=True)
    # The global reward of a session does not see what it does to others: worse than a coin.
    assert of_others["grpo"].session_rate < 0.45
    assert of_others["local"].session_rate > 0.75
    assert of_others["logo"].session_rate > of_others["grpo"].session_rate + 0.05
    assert of_others["local"].row_rate > 0.58 > 0.5 > of_others["grpo"].row_rate
    every = compare_signs(30, StudyConfig(), 1, of_others=False)
    assert every["logo"].session_rate > every["grpo"].session_rate


def test_logo_learns_at_least_as_well_over_three_seeds():
    curves = {fraction: np.array([train(StudyConfig(local_fraction=fraction, num_steps=40,
                                                    test_games=24), seed) for seed in range(3)])
              for fraction in (0.0, 0.5)}
    grpo, logo = curves[0.0], curves[0.5]
    np.testing.assert_array_equal(grpo[:, 0], logo[:, 0])
    assert (logo[:, -1] >= grpo[:, -1]).all()
    assert logo[:, -1].min() > 0.95
