"""The memory game by hand: contexts, answers, causes of failures and rewards."""

import numpy as np
import pytest

from memcalib_jax.synthetic.memory_game import (
    ACTIONS, CONTEXTS, RIGHT, Fact, Game, draw_game, empty_bank, failures, global_rewards,
    local_reward, play, play_session)

INSERT, OVERWRITE, LEAVE = range(3)
NEW, KNOWN, SMALL_TALK = range(3)

# Session 1 tells thing 0, session 2 tells thing 1, session 3 tells thing 0 anew.
GAME = Game(((Fact(0, 10, 0.0), Fact(None, 1, 0.0)),
             (Fact(1, 11, 0.0), Fact(None, 2, 0.0)),
             (Fact(0, 20, 0.0), Fact(None, 3, 0.0))))


def play_actions(game, *actions):
    waiting = iter(actions)
    return play(game, lambda context: next(waiting))


def right_play(game):
    return play(game, lambda context: ACTIONS.index(RIGHT[CONTEXTS[context]]))


def test_the_right_actions_answer_everything():
    played = right_play(GAME)
    assert [move.contexts for move in played.moves] == [
        (NEW, SMALL_TALK), (NEW, SMALL_TALK), (KNOWN, SMALL_TALK)]
    assert failures(GAME, played.banks, GAME.questions()) == {}
    # Twelve words in the bank of 36 told: no penalty.
    assert global_rewards(GAME, played.banks[-1]) == [1.0, 1.0, 1.0]


def test_who_overwrites_another_memory_is_the_cause_and_is_not_blamed():
    # Session 2 keeps its own fact in the place of thing 0, which session 3 then leaves.
    played = play_actions(GAME, INSERT, LEAVE, OVERWRITE, LEAVE, LEAVE, LEAVE)
    assert [len(bank) for bank in played.banks] == [0, 1, 1, 1]
    assert failures(GAME, played.banks, GAME.questions()) == {0: 2}
    assert global_rewards(GAME, played.banks[-1]) == [0.0, 1.0, 0.0]
    # Its reroll would be: by then thing 0, told again later, is not asked.
    assert local_reward(GAME, played.banks[2], 2) == 1.0


def test_a_lost_memory_makes_a_known_thing_new():
    played = play_actions(GAME, INSERT, LEAVE, OVERWRITE, LEAVE, INSERT, LEAVE)
    assert played.moves[2].contexts == (NEW, SMALL_TALK)
    assert failures(GAME, played.banks, GAME.questions()) == {}


def test_a_stale_memory_answers_before_the_new_one():
    played = play_actions(GAME, INSERT, LEAVE, INSERT, LEAVE, INSERT, LEAVE)
    assert failures(GAME, played.banks, GAME.questions()) == {0: 3}


def test_what_is_never_kept_fails_from_its_telling_on():
    played = play_actions(GAME, LEAVE, LEAVE, LEAVE, LEAVE, LEAVE, LEAVE)
    assert failures(GAME, played.banks, GAME.questions()) == {0: 1, 1: 2}


def test_a_local_reward_asks_what_is_settled_and_charges_for_size():
    # Everything inserted: 12 words of 12 told exceed the allowance by 0.3.
    _, bank = play_session(GAME, 1, empty_bank(), lambda context: INSERT)
    assert local_reward(GAME, bank, 1) == pytest.approx(0.0 - 0.3 * 0.3)
    _, bank = play_session(GAME, 2, bank, lambda context: INSERT)
    assert local_reward(GAME, bank, 2) == pytest.approx(1.0 - 0.3 * 0.3)


def test_drawn_games_can_be_won():
    for seed in range(20):
        game = draw_game(np.random.default_rng(seed))
        assert game == draw_game(np.random.default_rng(seed))
        assert [len(facts) for facts in game.sessions] == [3] * 8
        assert failures(game, right_play(game).banks, game.questions()) == {}
