"""One decoding step over a two-part cache: each prompt once, and each response's tail.

G rows share a prompt's slot. They start together, so that one length describes all their
tails. Tails are rings: every row of every slot writes the same column at the same step, and a
column's age says which rows may see it. Slots filled at different times thus need one
in-place update a layer and no scatter. A delta net layer has no tail: what it knows of a row is
one state, which starts as a copy of its prompt's.
"""

import jax
import jax.numpy as jnp
from flax import struct

from memcalib_jax.models import layers
from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.delta_net import (
    DeltaState, convolve, delta_output, project_delta, recurrent_step, split_heads)
from memcalib_jax.models.mlp import mlp
from memcalib_jax.models.stack import scan_layers, take_layer


@struct.dataclass
class Cache:
    """Rotated keys and values of P prompt slots with G rows each, and states of delta net layers.

    Attributes:
      prompt_k, prompt_v: `[L, P, K, S, d]`, read by all G rows of a slot.
      tail_k, tail_v: `[L, P * G, K, T, d]`, each row's own tokens, in a ring of T columns.
      prompt_length: int32 `[P]`, valid tokens of each prompt.
      tail_length: int32 `[P]`, tokens that each row of a slot has in its ring; at most T.
      clock: int32 scalar, steps so far; the next column written is `clock mod T`.
      states: of each row, with leading axes `[L, P, G]` over the delta net layers; None for a
        model without such layers.
    """

    prompt_k: jax.Array
    prompt_v: jax.Array
    tail_k: jax.Array
    tail_v: jax.Array
    prompt_length: jax.Array
    tail_length: jax.Array
    clock: jax.Array
    states: DeltaState | None = None


def two_part_attention(q, prompt_k, prompt_v, tail_k, tail_v, prompt_mask, tail_mask):
    """Attends rows to their slot's prompt and their own tail under one softmax.

    Args:
      q: float `[P, G, H, d]`, rotated.
      prompt_k, prompt_v: `[P, K, S, d]`; products take their dtype, softmax is float32.
      tail_k, tail_v: `[P * G, K, T, d]`.
      prompt_mask: bool `[P, S]`; tail_mask: bool `[P, T]`, true where a key may be seen.

    Returns:
      float32 `[P, G, H, d]`.
    """
    slots, group, heads, dim = q.shape
    kv_heads, prompt_size = prompt_k.shape[1:3]
    repeats = heads // kv_heads
    q = (q * dim ** -0.5).reshape(slots, group, kv_heads, repeats, dim)

    # The group's queries stand side by side, so that a prompt's keys are read once for all.
    def side_by_side(x):
        return x.transpose(0, 2, 1, 3, 4).reshape(slots, kv_heads, group * repeats, -1)

    def by_row(x):
        return x.reshape(slots, kv_heads, group, repeats, -1).transpose(0, 2, 1, 3, 4)

    to_prompt = by_row(layers.contract("pkqd,pksd->pkqs", side_by_side(q), prompt_k))
    to_tail = layers.contract(
        "bkrd,bktd->bkrt", q.reshape(slots * group, kv_heads, repeats, dim), tail_k)
    to_tail = to_tail.reshape(*to_prompt.shape[:-1], -1)
    hidden = jnp.finfo(jnp.float32).min
    scores = jnp.concatenate([
        jnp.where(prompt_mask[:, None, None, None], to_prompt, hidden),
        jnp.where(tail_mask[:, None, None, None], to_tail, hidden)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    from_prompt = layers.contract(
        "pkqs,pksd->pkqd", side_by_side(weights[..., :prompt_size]), prompt_v)
    from_tail = layers.contract(
        "bkrt,bktd->bkrd",
        weights[..., prompt_size:].reshape(slots * group, kv_heads, repeats, -1), tail_v)
    return (by_row(from_prompt) + from_tail.reshape(q.shape)).reshape(slots, group, heads, dim)


def decode_step(params: dict, config: ModelConfig, cache: Cache, tokens_P_G: jax.Array):
    """Feeds one token a row and returns what predicts the next one.

    Args:
      params: tree of `config.parameter_shapes()`.
      config: the model's shape.
      cache: what the rows have seen; every live slot's `tail_length` is less than T.
      tokens_P_G: int32 `[P, G]`, each row's next token.

    Returns:
      The normalized last hidden states, float32 `[P, G, D]`, and the cache with the tokens in
      it. A slot that holds no prompt gets finite values without meaning.
    """
    slots, group = tokens_P_G.shape
    prompt_size, tail_size = cache.prompt_k.shape[3], cache.tail_k.shape[3]
    column = cache.clock % tail_size
    age = (column - jnp.arange(tail_size)) % tail_size
    prompt_mask = jnp.arange(prompt_size) < cache.prompt_length[:, None]
    tail_mask = age <= cache.tail_length[:, None]
    positions = jnp.broadcast_to(
        (cache.prompt_length + cache.tail_length)[:, None], tokens_P_G.shape)

    def write(tail, new, index):
        new = new.reshape(1, slots * group, config.num_kv_heads, 1, config.head_dim)
        return jax.lax.dynamic_update_slice(tail, new, (index, 0, 0, column, 0))

    # Tails and states ride in the carry, not in the scan's inputs and outputs: they stay in place.
    # Weights and prompts are taken a layer at a time, or a period's would be copied first.
    def attention_step(carry, index):
        x, tail_k, tail_v, states = carry
        layer, prompt_k, prompt_v = take_layer(
            (params["layers"], cache.prompt_k, cache.prompt_v), index)
        q, k, v, gate = layers.project_qkv(x, positions, layer, config)
        tail_k, tail_v = write(tail_k, k, index), write(tail_v, v, index)
        mixed = two_part_attention(q, prompt_k, prompt_v, tail_k[index], tail_v[index],
                                   prompt_mask, tail_mask)
        x = layers.attention_output(x, mixed, gate, layer)
        return (mlp(x, layer, config), tail_k, tail_v, states), None

    def delta_step(carry, index):
        x, tail_k, tail_v, states = carry
        layer, state = take_layer((params["delta_layers"], states), index)
        x, state = _delta_layer(x, layer, state, config)
        states = jax.tree.map(lambda room, new: room.at[index].set(new), states, state)
        return (mlp(x, layer, config), tail_k, tail_v, states), None

    start = (layers.embed(params, tokens_P_G), cache.tail_k, cache.tail_v, cache.states)
    (x, tail_k, tail_v, states), _ = scan_layers(
        config.layer_pattern, {"attention": attention_step, "delta": delta_step}, start,
        {kind: jnp.arange(config.layer_kinds.count(kind)) for kind in config.layer_pattern})
    hidden = layers.norm(x, params["final_norm"], config)
    return hidden, cache.replace(tail_k=tail_k, tail_v=tail_v, states=states,
                                 tail_length=cache.tail_length + 1, clock=cache.clock + 1)


def _delta_layer(x, layer, state: DeltaState, config: ModelConfig):
    """Feeds each row's token `x [P, G, D]` to its state; returns the stream and the state."""
    inputs, log_decay, beta, gate = project_delta(x, layer, config)
    near = jnp.concatenate([state.inputs, inputs[..., None, :]], axis=-2)
    q, k, v = split_heads(convolve(near, layer["conv"])[..., 0, :], config.delta)
    memory, mixed = recurrent_step(state.memory, q, k, v, log_decay, beta)
    return (delta_output(x, mixed, gate, layer, config),
            DeltaState(memory, near[..., 1:, :]))
