"""Packed chats: ratios of 1 at first, gradients as of single dense chats, and learning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_params

from memcalib_jax.credit import logo_loss
from memcalib_jax.memory.agents import Chat
from memcalib_jax.models import ModelConfig, logits
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.training.logo import LogoConfig, logo_sums, logo_update, pack_chats
from memcalib_jax.training.state import OptimizerConfig, init_state
from memcalib_jax.training.update import gradient_sums

CONFIG = ModelConfig("llama", vocab_size=31, hidden_size=16, intermediate_size=24, num_layers=2,
                     num_heads=2, num_kv_heads=1, head_dim=8, max_positions=256, eos_ids=(2,))
SIZES = bin_sizes(256)
NEW, OLD, START = (random_params(CONFIG, scale=0.3, seed=seed) for seed in range(3))
OBJECTIVE = LogoConfig(compute_dtype="float32", kl_weight=0.1, entropy_weight=0.0)


def chat_of(seed, prompt, *lengths):
    """A prompt, then replies of these lengths with three tokens of the user's between them."""
    random = np.random.default_rng(seed)
    tokens, steps = list(prompt), []
    for length in lengths:
        if steps:
            tokens += random.integers(3, 31, 3).tolist()
        steps.append((len(tokens), len(tokens) + length))
        tokens += random.integers(3, 31, length).tolist()
    return Chat((), tuple(tokens), tuple(steps))


CHATS = [chat_of(0, range(3, 12), 5, 2, 7), chat_of(1, range(3, 12), 1, 40), chat_of(2, [4, 9], 6)]
ADVANTAGES = [1.0, -0.7, 0.3]


def dense_loss(params, level, chats=CHATS, advantages=ADVANTAGES):
    """The objective by one dense forward a chat and a loop over its steps."""
    total, count = 0.0, 0.0
    for chat, advantage in zip(chats, advantages):
        tokens = jnp.array([chat.tokens])
        rows = [jax.nn.log_softmax(logits(p, CONFIG, tokens, jnp.array([tokens.size])))[0]
                for p in (params, OLD, START)]
        for start, end in chat.steps:
            places = np.arange(start, end)
            picked = [row[places - 1, np.array(chat.tokens)[places]][None] for row in rows]
            entropies = -jnp.sum(jnp.exp(rows[0]) * rows[0], -1)[places - 1][None]
            loss, units = logo_loss(*picked, jnp.array([advantage]), jnp.ones((1, end - start), bool),
                                    kl=0.1, level=level, entropies_S_T=entropies,
                                    entropy_weight=0.5)
            total, count = total + loss, count + units
    return total, count


@pytest.mark.parametrize("level, units", [("step", 6), ("token", 61)])
def test_packed_chats_have_the_gradient_of_dense_ones(level, units):
    with jax.default_matmul_precision("highest"):
        batches = pack_chats(CONFIG, CHATS, ADVANTAGES, OLD, START, SIZES)
        objective = LogoConfig(compute_dtype="float32", kl_weight=0.1, entropy_weight=0.5,
                               level=level)
        gradient, sums = gradient_sums(NEW, CONFIG, batches, objective, measure=logo_sums)
        (loss, count), expected = jax.value_and_grad(
            functools.partial(dense_loss, level=level), has_aux=True)(NEW)
    assert float(sums.tokens) == float(count) == units
    assert float(sums.step_tokens) == 61
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-4)
    for path, value in jax.tree.leaves_with_path(expected):
        got = functools.reduce(lambda tree, key: tree[key.key], path, gradient)
        np.testing.assert_allclose(got, value, atol=2e-4 * float(jnp.abs(value).max()) + 1e-6)


def test_the_split_into_micro_batches_changes_nothing():
    whole = pack_chats(CONFIG, CHATS, ADVANTAGES, OLD, START, SIZES)
    split = [batch for chat, a in zip(CHATS, ADVANTAGES)
             for batch in pack_chats(CONFIG, [chat], [a], OLD, START, SIZES)]
    (one, sums), (other, other_sums) = (
        gradient_sums(NEW, CONFIG, batches, OBJECTIVE, measure=logo_sums)
        for batches in (whole, split))
    np.testing.assert_allclose(other_sums.loss, sums.loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(a).max()) + 1e-6)


def test_the_first_ratio_is_one_and_updates_follow_the_advantage():
    def mean_log_prob(params, chat):
        batch, = pack_chats(CONFIG, [chat], [0.0], params, params, SIZES)
        values = np.asarray(batch.old_log_probs).reshape(-1)[batch.places_S_T]
        return values[batch.mask_S_T].mean()

    optimizer = OptimizerConfig(learning_rate=1e-2)
    before = [mean_log_prob(OLD, chat) for chat in CHATS]
    state, metrics = logo_update(
        init_state(OLD, optimizer), CONFIG, CHATS, [1.0, -1.0, 0.0], OLD, OLD, OBJECTIVE,
        optimizer, SIZES, num_epochs=2, num_mini_batches=1, seed=0)
    assert metrics["loss/first_ratio_error"] < 1e-5 < metrics["loss/max_ratio_error"]
    after = [mean_log_prob(state.params, chat) for chat in CHATS]
    assert after[0] > before[0] + 0.01 and after[1] < before[1] - 0.01
