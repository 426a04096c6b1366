"""Token and sentence scores, worked by hand; the whole is compared in test_assign."""

import jax
import jax.numpy as jnp
import numpy as np

from memcalib_jax.credit.localization import (
    aligned_signals,
    candidate_tokens,
    localize_sentences,
    localize_tokens,
)

ONES = jnp.ones((9, 4), bool)
UNDER_USE = [3, 6, 7]


def in_every_channel(values):
    return jnp.broadcast_to(jnp.array(values, jnp.float32), (9, len(values)))


def test_signals_take_each_channels_sign():
    full = jnp.array([-1.0, -1.0, -1.0, jnp.nan])
    ablated = in_every_channel([-1.5, -0.25, -jnp.inf, 3.0])
    mask = ONES.at[:, 3].set(False)
    ordered = aligned_signals(full, ablated, mask.at[0].set(False), "ordered")
    np.testing.assert_array_equal(ordered[0], 0)
    np.testing.assert_array_equal(ordered[8], [0.5, -0.75, np.inf, 0])
    np.testing.assert_array_equal(ordered[6], [-0.5, 0.75, -np.inf, 0])
    absolute = aligned_signals(full, ablated, mask.at[0].set(False), "absolute")
    np.testing.assert_array_equal(absolute[6], [0.5, 0.75, np.inf, 0])


def test_token_scores():
    signals = in_every_channel([0.5, 5.0, 0.1, -4.0])
    found = localize_tokens(
        signals, jnp.clip(signals, -3, 3), ONES, jnp.full(9, 0.25), min_signal=0.02
    )
    np.testing.assert_array_equal(found.scores[4], [0.25, 2.75, 0, 0])
    assert found.signal_gate.all()


def test_the_gate_is_strict_and_looks_at_unclipped_signals():
    signals = in_every_channel([0.5, 0.1])
    shut = localize_tokens(signals, signals, ONES[:, :2], jnp.zeros(9), min_signal=0.5)
    assert not shut.signal_gate.any()
    clipped = jnp.clip(signals, -0.2, 0.2)
    opened = localize_tokens(signals, clipped, ONES[:, :2], jnp.zeros(9), min_signal=0.4)
    assert opened.signal_gate.all()


def test_no_candidate_shuts_the_gate():
    with jax.debug_nans(True):
        found = localize_tokens(
            jnp.zeros((9, 4)), jnp.zeros((9, 4)), ~ONES, jnp.zeros(9), min_signal=0.02
        )
    assert not found.signal_gate.any() and not found.scores.any()


def test_stop_tokens_are_no_candidates_for_under_use_only():
    stop = jnp.array([False, False, False, True])
    left = candidate_tokens(ONES, stop)
    assert left[:, :3].all()
    assert np.flatnonzero(~left[:, 3]).tolist() == UNDER_USE
    assert candidate_tokens(ONES, None) is ONES


def sentences(signals, ids, *, candidates=None, coverage_power=1.0, sentence_threshold=0.25):
    signals = in_every_channel(signals)
    return localize_sentences(
        signals,
        jnp.clip(signals, -3, 3),
        jnp.ones(signals.shape, bool) if candidates is None else candidates,
        jnp.array(ids),
        jnp.full(9, 0.5),
        jnp.full(9, sentence_threshold),
        min_signal=0.02,
        min_sentence_signal=0.01,
        coverage_power=coverage_power,
    )


def test_sentence_scores():
    # Sentence 0: clipped mean (1 + 3 + 0) / 3, two of three tokens over .5; sentence 2: one token,
    # mean .75. Scores (4/3 - .25) * 2/3 over three tokens and (.75 - .25) * 1 over one.
    found = sentences([1.0, 7.0, 0.0, 0.75], [0, 0, 0, 2])
    first = (4 / 3 - 0.25) * (2 / 3) / 3
    np.testing.assert_allclose(found.scores[5], [first, first, first, 0.5], rtol=3e-7)
    np.testing.assert_allclose(found.sentence_means[5], [4 / 3, 0, 0.75, 0], rtol=1e-7)
    np.testing.assert_array_equal(found.sentence_mask[5], [True, False, True, False])
    assert found.signal_gate.all()


def test_coverage_power():
    squared = sentences([1.0, 0.0], [0, 0], coverage_power=2.0)
    np.testing.assert_allclose(squared.scores[1], [0.25 * 0.25 / 2] * 2)
    # Power 0 ignores coverage, even where no token is over the token threshold.
    ignored = sentences([0.4, 0.4], [0, 0], coverage_power=0.0)
    np.testing.assert_allclose(ignored.scores[1], [0.15 / 2] * 2, rtol=1e-6)
    assert not sentences([0.4, 0.4], [0, 0]).scores.any()


def test_the_sentence_gate_needs_a_mean():
    # A strong token, and a mean of 0.
    found = sentences([1.0, -1.0], [0, 0])
    assert not found.signal_gate.any()


def test_tokens_that_are_no_candidates_count_for_no_sentence():
    candidates = jnp.ones((9, 3), bool).at[:, 1].set(False)
    found = sentences([1.0, -9.0, 2.0], [0, 0, 1], candidates=candidates)
    np.testing.assert_allclose(found.scores[1], [0.75, 0, 1.75])
    lonely = sentences([1.0, -9.0, 2.0], [0, 1, 2], candidates=candidates)
    np.testing.assert_array_equal(lonely.sentence_mask[1], [True, False, True])


def test_any_sentence_id_behind_the_mask_is_ignored():
    candidates = jnp.ones((9, 3), bool).at[:, 2].set(False)
    plain = sentences([1.0, 0.5, 4.0], [0, 1, 1], candidates=candidates)
    for odd in (-1, 3, 1_000_000):
        other = sentences([1.0, 0.5, 4.0], [0, 1, odd], candidates=candidates)
        jax.tree.map(np.testing.assert_array_equal, other, plain)
