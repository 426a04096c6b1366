"""Which counterfactuals are scored, and that sharing is checked."""

import types

import jax
import numpy as np
import pytest
from random_models import random_params

from memcalib_jax.credit import BOUND, CONTROL, IGNORE, CreditConfig
from memcalib_jax.models import ModelConfig
from memcalib_jax.sampling import Sample
from memcalib_jax.scoring import ScoringGroup
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.scoring.counterfactual import pack_groups, score_packing
from memcalib_jax.training.advantages import (
    Counterfactuals, JudgedLevels, pairs_to_score, stop_mask)
from memcalib_jax.training.rollouts import Rollouts
from memcalib_jax.training.sharing import SharingMismatch, check_sharing

AB, BA, B, C = 1, 3, 4, 8


def levels(actual_G_A, ideal_A, invalid=()):
    actual = np.asarray(actual_G_A)[None]
    valid = np.ones(actual.shape[:2], bool)
    valid[0, list(invalid)] = False
    return JudgedLevels(np.broadcast_to(ideal_A, actual.shape), actual,
                        np.broadcast_to(valid[..., None], actual.shape), valid)


def chosen(judged, fraction, seed=0):
    scored = pairs_to_score(judged, CreditConfig.create(), fraction, jax.random.key(seed))
    return {(int(g), int(c)) for _, g, c in np.argwhere(scored)}


# One Bound atom: two responses use it rightly, one ignores it, one is invalid. Rewards in B+ are
# 1, 1, 0 and in BA- 0, 0, -1, so all three have reward and advantage of one sign. The Control atom
# is controlled by all: its group is degenerate and its gates are shut. Ignored Ignore atoms are
# no localizable channel.
MIXED = levels([[IGNORE, BOUND, CONTROL], [IGNORE, BOUND, CONTROL], [IGNORE, IGNORE, CONTROL],
                [IGNORE, BOUND, CONTROL]], [IGNORE, BOUND, CONTROL], invalid=[3])


def test_every_triggered_pair_of_a_valid_response_by_default():
    assert chosen(MIXED, 1.0) == {(0, B), (1, B), (2, BA), (0, C), (1, C), (2, C)}


def test_shut_gates_are_left_out_at_fraction_zero():
    assert chosen(MIXED, 0.0) == {(0, B), (1, B), (2, BA)}


def test_a_share_of_shut_gates_is_drawn_from_the_key():
    many = levels(np.full((400, 1), CONTROL), [CONTROL])
    drawn = chosen(many, 0.25)
    assert drawn == chosen(many, 0.25) != chosen(many, 0.25, seed=1)
    assert 70 < len(drawn) < 130


def test_only_a_response_that_stopped_has_a_stop_token():
    samples = [[Sample([5, 6, 2], [0.0] * 3, "stop"), Sample([5, 6, 2, 7], [0.0] * 4, "length"),
                Sample([2], [0.0], "stop")]]
    mask = stop_mask(Rollouts([], samples, [], []), 4)
    assert mask.astype(int).tolist() == [[[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]]


CONFIG = ModelConfig("llama", 41, 16, 24, 2, 4, 2, 4)


def scored_group(noise=0.0):
    params = random_params(CONFIG, scale=0.3)
    prompt = list(range(1, 20))
    group = ScoringGroup([prompt, prompt[:5] + prompt[9:], prompt], [[3, 4, 5], [6, 7]],
                         [(0, 0), (1, 0), (0, 1), (2, 0)], [0, 0, 17])
    packing = pack_groups(CONFIG, [group], bin_sizes(256))
    log_probs = score_packing(params, CONFIG, packing)
    scores = Counterfactuals(None, None, None, noise, [group], log_probs, packing)
    return types.SimpleNamespace(params=params, config=CONFIG), scores


def test_shared_scores_pass_the_check():
    policy, scores = scored_group()
    assert check_sharing(policy, scores, 1.0) < 1e-5


def test_wrong_scores_stop_the_run():
    policy, scores = scored_group()
    scores.log_probs[0][1] = scores.log_probs[0][1] + np.float32(0.01)
    with pytest.raises(SharingMismatch, match="differs from dense rows by .* nats"):
        check_sharing(policy, scores, 1.0)
    noisy = Counterfactuals(None, None, None, 0.01, scores.groups, scores.log_probs,
                            scores.packing)
    assert 0.005 < check_sharing(policy, noisy, 1.0) < 0.01  # within what bfloat16 rounds
