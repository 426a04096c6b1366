"""One decoding step over a two-part cache: each prompt once, and each response's tail.

G rows share a prompt's slot. They start together, so that one length describes all their
tails. Tails are rings: every row of every slot writes the same column at the same step, and a
column's age says which rows may see it. Slots filled at different times thus need one
in-place update a layer and no scatter. A delta net layer has no tail: what it knows of a row is
one state, which starts as a copy of its prompt's.

Layers are not scanned here: each has arrays of its own. A step reads all weights and the whole
cache to compute little, and a scan would copy every slice that it takes on a CPU.
"""

import jax
import jax.numpy as jnp
from flax import struct

from memcalib_jax.models import layers
from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.delta_net import (
    DeltaState, convolve, delta_output, project_delta, recurrent_step, split_heads)
from memcalib_jax.models.mlp import mlp
from memcalib_jax.models.stack import take_layer


@struct.dataclass
class Cache:
    """Rotated keys and values of P prompt slots with G rows each, and states of delta net layers.

    Attributes:
      prompt_k, prompt_v: of each attention layer `[P, K, d, S]` and `[P, K, S, d]`, as their
        products want them; read by all G rows of a slot.
      tail_k, tail_v: of each attention layer `[P * G, K, d, T]` and `[P * G, K, T, d]`, each
        row's own tokens, in a ring of T columns.
      prompt_length: int32 `[P]`, valid tokens of each prompt.
      tail_length: int32 `[P]`, tokens that each row of a slot has in its ring; at most T.
      clock: int32 scalar, steps so far; the next column written is `clock mod T`.
      states: of each delta net layer, with leading axes `[P, G]`.
    """

    prompt_k: tuple[jax.Array, ...]
    prompt_v: tuple[jax.Array, ...]
    tail_k: tuple[jax.Array, ...]
    tail_v: tuple[jax.Array, ...]
    prompt_length: jax.Array
    tail_length: jax.Array
    clock: jax.Array
    states: tuple[DeltaState, ...] = ()


def two_part_attention(q, prompt_k, prompt_v, tail_k, tail_v, prompt_mask, tail_mask):
    """Attends rows to their slot's prompt and their own tail under one softmax.

    Args:
      q: float `[P, G, H, d]`, rotated.
      prompt_k `[P, K, d, S]`, prompt_v `[P, K, S, d]`: products take their dtype, softmax is
        float32.
      tail_k `[P * G, K, d, T]`, tail_v `[P * G, K, T, d]`.
      prompt_mask: bool `[P, S]`; tail_mask: bool `[P, T]`, true where a key may be seen.

    Returns:
      float32 `[P, G, H, d]`.
    """
    slots, group, heads, dim = q.shape
    kv_heads = prompt_k.shape[1]
    repeats = heads // kv_heads
    q = (q * dim ** -0.5).reshape(slots * group, kv_heads, repeats, dim)

    # The group's queries stand side by side, so that a prompt's keys are read once for all. The two
    # parts are as long as the contexts: they are neither joined nor laid out anew.
    def side_by_side(x):
        x = x.reshape(slots, group, kv_heads, repeats, -1).swapaxes(1, 2)
        return x.reshape(slots, kv_heads, group * repeats, -1)

    def by_row(x):
        x = x.reshape(slots, kv_heads, group, repeats, -1).swapaxes(1, 2)
        return x.reshape(slots * group, kv_heads, repeats, -1)

    lowest = jnp.finfo(jnp.float32).min
    to_prompt = layers.contract("pkqd,pkds->pkqs", side_by_side(q), prompt_k)
    to_prompt = jnp.where(prompt_mask[:, None, None], to_prompt, lowest)
    to_tail = layers.contract("bkrd,bkdt->bkrt", q, tail_k)
    to_tail = jnp.where(jnp.repeat(tail_mask, group, axis=0)[:, None, None], to_tail, lowest)
    highest = jnp.maximum(by_row(to_prompt.max(-1)), to_tail.max(-1, keepdims=True))
    prompt_weights = jnp.exp(to_prompt - side_by_side(highest))
    tail_weights = jnp.exp(to_tail - highest)
    total = by_row(prompt_weights.sum(-1)) + tail_weights.sum(-1, keepdims=True)
    mixed = by_row(layers.contract("pkqs,pksd->pkqd", prompt_weights, prompt_v))
    mixed = mixed + layers.contract("bkrt,bktd->bkrd", tail_weights, tail_v)
    return (mixed / total).reshape(slots, group, heads, dim)


def decode_step(params: dict, config: ModelConfig, cache: Cache, tokens_P_G: jax.Array):
    """Feeds one token a row and returns what predicts the next one.

    Args:
      params: tree of `config.parameter_shapes()`, its layers stacked or taken apart by
        `separate_layers`.
      config: the model's shape.
      cache: what the rows have seen; every live slot's `tail_length` is less than T.
      tokens_P_G: int32 `[P, G]`, each row's next token.

    Returns:
      The normalized last hidden states, float32 `[P, G, D]`, and the cache with the tokens in
      it. A slot that holds no prompt gets finite values without meaning.
    """
    slots, group = tokens_P_G.shape
    prompt_size, tail_size = cache.prompt_k[0].shape[-1], cache.tail_k[0].shape[-1]
    column = cache.clock % tail_size
    age = (column - jnp.arange(tail_size)) % tail_size
    prompt_mask = jnp.arange(prompt_size) < cache.prompt_length[:, None]
    tail_mask = age <= cache.tail_length[:, None]
    positions = jnp.broadcast_to(
        (cache.prompt_length + cache.tail_length)[:, None], tokens_P_G.shape)

    def write(tail, new, axis):
        new = new.reshape(slots * group, config.num_kv_heads, config.head_dim)
        return jax.lax.dynamic_update_slice_in_dim(
            tail, jnp.expand_dims(new, axis), column, axis)

    x = layers.embed(params, tokens_P_G)
    tail_k, tail_v, states = [], [], []
    for kind in config.layer_kinds:
        if kind == "attention":
            i = len(tail_k)
            layer = take_layer(params["layers"], i)
            q, k, v, gate = layers.project_qkv(x, positions, layer, config)
            tail_k.append(write(cache.tail_k[i], k, 3))
            tail_v.append(write(cache.tail_v[i], v, 2))
            mixed = two_part_attention(q, cache.prompt_k[i], cache.prompt_v[i], tail_k[i],
                                       tail_v[i], prompt_mask, tail_mask)
            x = layers.attention_output(x, mixed, gate, layer)
        else:
            layer = take_layer(params["delta_layers"], len(states))
            x, state = _delta_layer(x, layer, cache.states[len(states)], config)
            states.append(state)
        x = mlp(x, layer, config)[0]
    hidden = layers.norm(x, params["final_norm"], config)
    return hidden, cache.replace(
        tail_k=tuple(tail_k), tail_v=tuple(tail_v), states=tuple(states),
        tail_length=cache.tail_length + 1, clock=cache.clock + 1)


def _delta_layer(x, layer, state: DeltaState, config: ModelConfig):
    """Feeds each row's token `x [P, G, D]` to its state; returns the stream and the state."""
    inputs, log_decay, beta, gate = project_delta(x, layer, config)
    near = jnp.concatenate([state.inputs, inputs[..., None, :]], axis=-2)
    q, k, v = split_heads(convolve(near, layer["conv"])[..., 0, :], config.delta)
    memory, mixed = recurrent_step(state.memory, q, k, v, log_decay, beta)
    return (delta_output(x, mixed, gate, layer, config),
            DeltaState(memory, near[..., 1:, :]))
