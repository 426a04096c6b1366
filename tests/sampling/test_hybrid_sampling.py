"""Sampling from a model of delta net and attention layers: states fork, advance and move."""

import hybrid_models
import jax
import numpy as np
import pytest

from memcalib_jax.models import logits
from memcalib_jax.sampling import sample
from memcalib_jax.scoring import score_dense

MODEL = hybrid_models.random_params(hybrid_models.CONFIG, seed=2), hybrid_models.CONFIG
# One ends a chunk of the forward, one goes beyond it, and one is shorter than the convolution.
PROMPTS = [np.random.RandomState(n).randint(0, 61, n).tolist() for n in (64, 3, 70, 1, 20)]


def draw_samples(prompts=PROMPTS, **changes):
    arguments = dict(num_samples=2, max_tokens=200, key=jax.random.key(0), stop_ids=[17])
    return sample(*MODEL, prompts, **(arguments | changes))


@pytest.fixture(scope="module")
def samples():
    return draw_samples(max_rows=4)  # two slots, refilled as they become vacant


def test_200_steps_equal_teacher_forcing(samples):
    flat = [(prompt, one) for prompt, row in zip(PROMPTS, samples) for one in row]
    lengths = np.array([len(prompt) + len(one.tokens) for prompt, one in flat])
    assert max(len(one.tokens) for _, one in flat) == 200 > min(len(one.tokens) for _, one in flat)
    tokens = np.zeros((len(flat), 272), np.int32)
    for row, (prompt, one) in zip(tokens, flat):
        row[:len(prompt) + len(one.tokens)] = prompt + one.tokens
    whole = np.asarray(jax.nn.log_softmax(logits(*MODEL, tokens, lengths)))
    for values, (prompt, one), length in zip(whole, flat, lengths):
        expected = values[len(prompt) - 1:length - 1][np.arange(len(one.tokens)), one.tokens]
        np.testing.assert_allclose(one.log_probs, expected, atol=1e-4)


def test_sampler_and_scorer_agree(samples):
    flat = [(prompt, one) for prompt, row in zip(PROMPTS, samples) for one in row]
    scored = score_dense(*MODEL, [prompt for prompt, _ in flat], [one.tokens for _, one in flat])
    for values, (_, one) in zip(scored, flat, strict=True):
        np.testing.assert_allclose(one.log_probs, values, atol=1e-4)


def test_tokens_do_not_depend_on_slots_and_compaction(samples):
    together = draw_samples()
    assert [[one.tokens for one in row] for row in together] == [
        [one.tokens for one in row] for row in samples]


def test_a_row_that_has_ended_changes_no_other(samples):
    """Prompt 2 alone draws what it drew beside prompts that ended before it."""
    alone = draw_samples([PROMPTS[2]], request_ids=[2], max_rows=4)[0]
    assert [one.tokens for one in alone] == [one.tokens for one in samples[2]]
