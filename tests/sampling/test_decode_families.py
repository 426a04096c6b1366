"""Decoding equals teacher forcing over many steps, for every kind of model."""

import dataclasses
import functools

import hybrid_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_params

from memcalib_jax.models import ModelConfig, layers, logits
from memcalib_jax.models.config import Experts
from memcalib_jax.models.decode import decode_step
from memcalib_jax.models.packed import plain_rows, prefill
from memcalib_jax.models.rope import Llama3, QueryScale, Rope, Yarn
from memcalib_jax.sampling.cache import empty_cache, put_prompts

SIZES = dict(vocab_size=43, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
             num_kv_heads=2, head_dim=8, max_positions=256)
# Scalings and query steps change within the first hundred positions.
CONFIGS = [
    dataclasses.replace(hybrid_models.CONFIG, num_layers=3),
    ModelConfig("llama", **SIZES, rope=Rope(100.0, scaling=Llama3(4.0, 1.0, 4.0, 32))),
    ModelConfig("ministral3", **SIZES, rope=Rope(100.0, scaling=Yarn(4.0, 32, mscale=2.0,
                                                                     mscale_all_dim=1.0)),
                query_scale=QueryScale(0.3, 32), tie_embeddings=False),
    ModelConfig("qwen2", **SIZES, attention_bias=True),
    ModelConfig("qwen3", **SIZES, qk_norm=True, tie_embeddings=False),
    ModelConfig("qwen3_moe", **SIZES, qk_norm=True, experts=Experts(6, 2), tie_embeddings=False),
    ModelConfig("qwen3_5_moe", **SIZES, qk_norm=True, rope=Rope(100.0, 0.5), attention_gate=True,
                zero_centred_norms=True, experts=Experts(5, 2, shared_size=12)),
]
PROMPT_LENGTHS = np.array([1, 9, 30, 5])
PROMPT_SIZE, STEPS = 30, 200


@functools.partial(jax.jit, static_argnames="config")
def forced_and_decoded(params, config, rows, prompt_lengths):
    """Returns logits of whole rows, and of their last `STEPS` tokens fed one by one."""
    whole = logits(params, config, rows, prompt_lengths + STEPS)
    prompts = rows[:, :PROMPT_SIZE]
    _, k, v, states = prefill(params, config, plain_rows(prompts, prompt_lengths))
    slots = jnp.arange(len(rows))
    cache = empty_cache(params, config, num_slots=len(rows), group_size=1,
                        prompt_size=PROMPT_SIZE, tail_size=STEPS)
    cache = put_prompts(cache, slots, k, v, states, prompt_lengths)

    def step(cache, place):
        token = rows[slots, prompt_lengths + place]
        hidden, cache = decode_step(params, config, cache, token[:, None])
        return cache, hidden[:, 0]

    _, hidden = jax.lax.scan(step, cache, jnp.arange(STEPS))
    return whole, layers.contract("tbd,vd->btv", hidden, layers.head_matrix(params))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
def test_two_hundred_steps_equal_the_forward(config):
    rows = np.random.RandomState(2).randint(
        0, config.vocab_size, (len(PROMPT_LENGTHS), PROMPT_SIZE + STEPS)).astype(np.int32)
    whole, decoded = forced_and_decoded(random_params(config, seed=3), config, rows, PROMPT_LENGTHS)
    for length, forced, ours in zip(PROMPT_LENGTHS, whole, decoded, strict=True):
        forced = jax.nn.log_softmax(forced[length:length + STEPS])
        assert forced.std(axis=0).mean() > 0.2
        np.testing.assert_allclose(jax.nn.log_softmax(ours), forced, atol=1e-4)
