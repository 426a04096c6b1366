"""The device programs of sampling: admit prompts, decode a block of steps, compact.

Each is a pure function of arrays, compiled once for each of a few static shapes.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from memcalib_jax.models import ModelConfig, layers
from memcalib_jax.models.decode import Cache, decode_step
from memcalib_jax.models.on_mesh import constrained, rows_spec, tensor_spec, whole
from memcalib_jax.models.packed import plain_rows, prefill
from memcalib_jax.sampling import cache as caches
from memcalib_jax.sampling.draw import Rule, draw, uniforms


@struct.dataclass
class Request:
    """What a draw depends on besides the model, the same for a whole call.

    Attributes:
      key: random key.
      rule: temperature and truncation.
      stop_ids: int32 `[N]`, each of which ends a response; -1, which no token is, pads them.
      max_tokens: int32 scalar, longest response.
    """

    key: jax.Array
    rule: Rule
    stop_ids: jax.Array
    max_tokens: jax.Array


@struct.dataclass
class Rows:
    """P slots of G rows that decode together.

    Attributes:
      cache: what the model knows of every token before each row's last one.
      tokens: int32 `[P, G]`, the last token drawn, not yet in the cache.
      done: bool `[P, G]`, the row has ended or never held a response.
      request_ids: uint32 `[P, G]` and sample_ids: int32 `[P, G]`: the row's random numbers.
    """

    cache: Cache
    tokens: jax.Array
    done: jax.Array
    request_ids: jax.Array
    sample_ids: jax.Array


@functools.partial(jax.jit, static_argnames=(
    "config", "num_slots", "group_size", "prompt_size", "tail_size"))
def vacant_rows(params: dict, config: ModelConfig, *, num_slots: int, group_size: int,
                prompt_size: int, tail_size: int) -> Rows:
    """Returns rows without responses."""
    cache = caches.empty_cache(params, config, num_slots=num_slots, group_size=group_size,
                               prompt_size=prompt_size, tail_size=tail_size)
    shape = (num_slots, group_size)
    return _by_slot(Rows(
        cache=cache, tokens=jnp.zeros(shape, jnp.int32), done=jnp.ones(shape, bool),
        request_ids=jnp.zeros(shape, jnp.uint32), sample_ids=jnp.zeros(shape, jnp.int32)))


def _by_slot(rows: Rows) -> Rows:
    """Returns rows whose slots are split over the mesh, and their keys and values by heads too."""
    slots = rows_spec(rows.tokens.shape[0])
    heads = tensor_spec(rows.cache.prompt_k[0].shape[1])
    by_head = {name: tuple(constrained(x, slots, heads) for x in getattr(rows.cache, name))
               for name in ("prompt_k", "prompt_v", "tail_k", "tail_v")}
    rows = jax.tree.map(lambda x: constrained(x, slots) if x.ndim else x, rows)
    return rows.replace(cache=rows.cache.replace(**by_head))


def _draw_next(params, hidden, request_ids, sample_ids, positions, request):
    """Draws the tokens at `positions` from hidden states `[..., D]`; says which end a row."""
    logits = layers.contract("...d,vd->...v", hidden, layers.head_matrix(params))
    uniform = uniforms(request.key, request_ids, sample_ids, positions)
    tokens, log_probs = draw(logits, uniform, request.rule)
    stopped = jnp.any(tokens[..., None] == request.stop_ids, axis=-1)
    return tokens, log_probs, stopped | (positions + 1 >= request.max_tokens)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="rows")
def admit(params: dict, config: ModelConfig, rows: Rows, request: Request, slots: jax.Array,
          prompts: jax.Array, lengths: jax.Array, request_ids: jax.Array,
          sample_ids: jax.Array):
    """Prefills prompts into vacant slots and draws the first token of each of their rows.

    Args:
      params, config: the model.
      rows: where the prompts go; donated.
      request: what the call asks for.
      slots: int32 `[n]`, distinct.
      prompts: int32 `[n, N]`, right-padded with any id; lengths: int32 `[n]`.
      request_ids: uint32 `[n, G]`; sample_ids: int32 `[n, G]`, negative for a row that holds
        no response.

    Returns:
      The rows; the first tokens and log-probs `[n, G]`; bool `[P, G]`, which rows have ended.
    """
    hidden, k, v, states = prefill(params, config, plain_rows(prompts, lengths))
    last = hidden[jnp.arange(prompts.shape[0]), lengths - 1]
    # Repeated before the head, so that each row draws as it does in a decoding step.
    last = jnp.broadcast_to(last[:, None], (*sample_ids.shape, last.shape[-1]))
    tokens, log_probs, ended = _draw_next(
        params, last, request_ids, sample_ids, jnp.zeros_like(sample_ids), request)
    rows = Rows(
        cache=caches.put_prompts(rows.cache, slots, k, v, states, lengths),
        tokens=rows.tokens.at[slots].set(tokens),
        done=rows.done.at[slots].set(ended | (sample_ids < 0)),
        request_ids=rows.request_ids.at[slots].set(request_ids),
        sample_ids=rows.sample_ids.at[slots].set(sample_ids))
    return _by_slot(rows), *map(whole, (tokens, log_probs, rows.done))


@functools.partial(jax.jit, static_argnames=("config", "num_steps"), donate_argnames="rows")
def decode_block(params: dict, config: ModelConfig, rows: Rows, request: Request,
                 num_steps: int):
    """Decodes up to `num_steps` tokens a row, fewer if every row ends before.

    Args:
      params, config: the model.
      rows: what decodes; donated. Every live row's tail has room for the block.
      request: what the call asks for.
      num_steps: static number of steps.

    Returns:
      The rows; tokens and log-probs `[num_steps, P, G]`; bool `[num_steps, P, G]`, true where
      a token belongs to a response (its row had not ended before); bool `[P, G]`, which rows have
      ended.
    """
    shape = (num_steps, *rows.tokens.shape)

    def step(carry):
        i, rows, tokens, log_probs, drawn = carry
        hidden, cache = decode_step(params, config, rows.cache, rows.tokens)
        positions = jnp.broadcast_to(cache.tail_length[:, None], rows.tokens.shape)
        token, log_prob, ended = _draw_next(
            params, hidden, rows.request_ids, rows.sample_ids, positions, request)
        tokens, log_probs = tokens.at[i].set(token), log_probs.at[i].set(log_prob)
        drawn = drawn.at[i].set(~rows.done)
        rows = rows.replace(cache=cache, tokens=token, done=rows.done | ended)
        return i + 1, rows, tokens, log_probs, drawn

    def unfinished(carry):
        return (carry[0] < num_steps) & jnp.any(~carry[1].done)

    start = (0, rows, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32),
             jnp.zeros(shape, bool))
    _, rows, tokens, log_probs, drawn = jax.lax.while_loop(unfinished, step, start)
    return _by_slot(rows), *map(whole, (tokens, log_probs, drawn, rows.done))


@functools.partial(jax.jit, static_argnames="tail_size")
def reshape_rows(rows: Rows, slots: jax.Array, places: jax.Array, tail_size: int) -> Rows:
    """Returns only the rows `places [n, G]` of `slots [n]`, with tails of another size."""
    cache = caches.take_rows(caches.resize_tails(rows.cache, tail_size), slots, places)
    per_row = (rows.tokens, rows.done, rows.request_ids, rows.sample_ids)
    tokens, done, request_ids, sample_ids = (x[slots[:, None], places] for x in per_row)
    return _by_slot(Rows(cache, tokens, done, request_ids, sample_ids))
