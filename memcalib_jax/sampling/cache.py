"""The life of a decoding cache: made empty, filled with prompts, resized and compacted."""

import jax
import jax.numpy as jnp

from memcalib_jax.models import ModelConfig
from memcalib_jax.models.decode import Cache
from memcalib_jax.models.delta_net import DeltaState


def empty_cache(params: dict, config: ModelConfig, *, num_slots: int, group_size: int,
                prompt_size: int, tail_size: int) -> Cache:
    """Returns a cache of vacant slots in the dtype of the parameters."""
    num_layers, dtype = params["layers"]["k"].shape[0], params["layers"]["k"].dtype

    def zeros(rows, size):
        return jnp.zeros((num_layers, rows, config.num_kv_heads, size, config.head_dim), dtype)

    return Cache(
        prompt_k=zeros(num_slots, prompt_size), prompt_v=zeros(num_slots, prompt_size),
        tail_k=zeros(num_slots * group_size, tail_size),
        tail_v=zeros(num_slots * group_size, tail_size),
        prompt_length=jnp.zeros(num_slots, jnp.int32),
        tail_length=jnp.zeros(num_slots, jnp.int32), clock=jnp.zeros((), jnp.int32),
        states=_empty_states(params, config, (num_slots, group_size)))


def _empty_states(params, config, rows):
    if config.delta is None:
        return None
    num_layers, width, channels = params["delta_layers"]["conv"].shape
    heads = (config.delta.num_value_heads, config.delta.key_dim, config.delta.value_dim)
    return DeltaState(memory=jnp.zeros((num_layers, *rows, *heads), jnp.float32),
                      inputs=jnp.zeros((num_layers, *rows, width - 1, channels), jnp.float32))


def put_prompts(cache: Cache, slots: jax.Array, k: jax.Array, v: jax.Array,
                states: DeltaState | None, lengths: jax.Array) -> Cache:
    """Returns the cache with new prompts in `slots [n]`, whose tails are empty.

    Args:
      cache: the cache to fill; whatever the slots held is forgotten.
      slots: int32 `[n]`, distinct.
      k, v: `[L, n, N, K, d]` from `prefill`, N at most the cache's prompt size.
      states: leading axes `[L, n]` from `prefill`; every row of a slot gets its prompt's.
      lengths: int32 `[n]`, valid tokens of each prompt.
    """
    size = k.shape[2]

    def put(room, new):
        return room.at[:, slots, :, :size].set(new.swapaxes(2, 3))

    return cache.replace(
        prompt_k=put(cache.prompt_k, k), prompt_v=put(cache.prompt_v, v),
        prompt_length=cache.prompt_length.at[slots].set(lengths),
        tail_length=cache.tail_length.at[slots].set(0),
        states=jax.tree.map(lambda room, new: room.at[:, slots].set(new[:, :, None]),
                            cache.states, states))


def resize_tails(cache: Cache, tail_size: int) -> Cache:
    """Returns the cache with rings of another size, each row's latest tokens kept.

    The ring is laid out anew, oldest column first. Columns older than a row's tail hold
    whatever they held: their age hides them, as before.
    """
    columns = (cache.clock - tail_size + jnp.arange(tail_size)) % cache.tail_k.shape[3]
    return cache.replace(
        tail_k=cache.tail_k[:, :, :, columns], tail_v=cache.tail_v[:, :, :, columns],
        clock=jnp.full((), tail_size, jnp.int32))


def take_slots(cache: Cache, slots: jax.Array) -> Cache:
    """Returns the cache with only `slots [n]`, in that order, their rows with them."""
    num_slots = cache.prompt_length.shape[0]

    def rows_of_slots(tail):
        grouped = tail.reshape(tail.shape[0], num_slots, -1, *tail.shape[2:])[:, slots]
        return grouped.reshape(tail.shape[0], -1, *tail.shape[2:])

    return cache.replace(
        prompt_k=cache.prompt_k[:, slots], prompt_v=cache.prompt_v[:, slots],
        tail_k=rows_of_slots(cache.tail_k), tail_v=rows_of_slots(cache.tail_v),
        prompt_length=cache.prompt_length[slots], tail_length=cache.tail_length[slots],
        states=jax.tree.map(lambda x: x[:, slots], cache.states))
