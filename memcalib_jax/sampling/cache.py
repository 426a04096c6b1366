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

    def zeros(rows, *columns):
        shape = (rows, config.num_kv_heads, *columns)
        return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))

    num_rows, dim = num_slots * group_size, config.head_dim
    return Cache(
        prompt_k=zeros(num_slots, dim, prompt_size), prompt_v=zeros(num_slots, prompt_size, dim),
        tail_k=zeros(num_rows, dim, tail_size), tail_v=zeros(num_rows, tail_size, dim),
        prompt_length=jnp.zeros(num_slots, jnp.int32),
        tail_length=jnp.zeros(num_slots, jnp.int32), clock=jnp.zeros((), jnp.int32),
        states=_empty_states(params, config, (num_slots, group_size)))


def _empty_states(params, config, rows):
    if config.delta is None:
        return ()
    num_layers, width, channels = params["delta_layers"]["conv"].shape
    heads = (config.delta.num_value_heads, config.delta.key_dim, config.delta.value_dim)
    return tuple(DeltaState(memory=jnp.zeros((*rows, *heads), jnp.float32),
                            inputs=jnp.zeros((*rows, width - 1, channels), jnp.float32))
                 for _ in range(num_layers))


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

    prompt_k = tuple(room.at[slots, :, :, :size].set(k[i].transpose(0, 2, 3, 1))
                     for i, room in enumerate(cache.prompt_k))
    prompt_v = tuple(room.at[slots, :, :size].set(v[i].transpose(0, 2, 1, 3))
                     for i, room in enumerate(cache.prompt_v))

    def put_state(i, state):
        return jax.tree.map(lambda room, new: room.at[slots].set(new[i][:, None]), state, states)

    return cache.replace(
        prompt_k=prompt_k, prompt_v=prompt_v,
        prompt_length=cache.prompt_length.at[slots].set(lengths),
        tail_length=cache.tail_length.at[slots].set(0),
        states=tuple(put_state(i, state) for i, state in enumerate(cache.states)))


def resize_tails(cache: Cache, tail_size: int) -> Cache:
    """Returns the cache with rings of another size, each row's latest tokens kept.

    The ring is laid out anew, oldest column first. Columns older than a row's tail hold
    whatever they held: their age hides them, as before.
    """
    columns = (cache.clock - tail_size + jnp.arange(tail_size)) % cache.tail_k[0].shape[-1]
    return cache.replace(
        tail_k=tuple(tail[..., columns] for tail in cache.tail_k),
        tail_v=tuple(tail[:, :, columns] for tail in cache.tail_v),
        clock=jnp.full((), tail_size, jnp.int32))


def take_rows(cache: Cache, slots: jax.Array, places: jax.Array) -> Cache:
    """Returns the cache with only `slots [n]`, in that order, and of each its rows `places [n, G]`.
    """
    num_slots = cache.prompt_length.shape[0]

    def of_rows(tail):
        grouped = tail.reshape(num_slots, -1, *tail.shape[1:])
        return grouped[slots[:, None], places].reshape(-1, *tail.shape[1:])

    tail_k, tail_v = jax.tree.map(of_rows, (cache.tail_k, cache.tail_v))
    prompt_k, prompt_v = jax.tree.map(lambda x: x[slots], (cache.prompt_k, cache.prompt_v))
    states = jax.tree.map(lambda x: x[slots[:, None], places], cache.states)
    return cache.replace(
        prompt_k=prompt_k, prompt_v=prompt_v, tail_k=tail_k, tail_v=tail_v, states=states,
        prompt_length=cache.prompt_length[slots], tail_length=cache.tail_length[slots])
