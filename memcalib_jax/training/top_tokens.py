"""Log-probs of each row's chosen tokens, and of all others together, without a row of logits.

The vocabulary is walked in blocks, forward and backward, so that the peak memory depends on the
block and not on the vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcalib_jax.models.layers import contract

VOCABULARY_BLOCK = 2048


class Buckets(NamedTuple):
    """A distribution in K + 1 buckets: K chosen tokens, and a tail of all the others.

    Attributes:
      chosen: float32 `[M, K]`, log-probs of the chosen tokens, nats.
      tail: float32 `[M]`, log-prob of the others together, nats. It is summed up from them and
        not from what the chosen leave of 1, so that it is right however small.
    """

    chosen: jax.Array
    tail: jax.Array


def bucket_log_probs(hidden_M_D: jax.Array, head_V_D: jax.Array, ids_M_K: jax.Array,
                     temperature: jax.Array | float = 1.0) -> Buckets:
    """Returns the log-probs of the chosen tokens and of the rest of the vocabulary.

    Args:
      hidden_M_D: float `[M, D]`, normalized hidden states.
      head_V_D: float `[V, D]`; products are in its dtype, sums in float32.
      ids_M_K: int `[M, K]`, K < V distinct ids in each row whose result is wanted.
      temperature: positive scalar.

    Returns:
      float32 buckets in nats, differentiable in hidden and head. The exponentials of a row add up
      to 1.
    """
    chosen, rest = _split_logits(hidden_M_D, head_V_D, ids_M_K,
                                 jnp.asarray(temperature, jnp.float32))
    normalizer = jnp.logaddexp(jax.nn.logsumexp(chosen, axis=-1), rest)
    return Buckets(chosen - normalizer[:, None], rest - normalizer)


def top_ids(hidden_M_D: jax.Array, head_V_D: jax.Array, k: int) -> jax.Array:
    """Returns the ids of each row's `k` largest logits, int32 `[M, k]`, the largest first."""
    def step(carry, block):
        values, ids = carry
        logits = jnp.where(block.new, block.logits, -jnp.inf)
        values = jnp.concatenate([values, logits], axis=1)
        ids = jnp.concatenate([ids, jnp.broadcast_to(block.ids, logits.shape)], axis=1)
        values, places = jax.lax.top_k(values, k)
        return values, jnp.take_along_axis(ids, places, axis=1)

    rows = hidden_M_D.shape[0]
    start = jnp.full((rows, k), -jnp.inf, jnp.float32), jnp.zeros((rows, k), jnp.int32)
    return _walk(step, start, hidden_M_D, head_V_D, 1.0)[1]


class _Block(NamedTuple):
    """Logits `[M, B]` of the tokens `ids [B]`; the `new [B]` of them were in no block before."""

    logits: jax.Array
    ids: jax.Array
    new: jax.Array
    rows_of_head: jax.Array


def _walk(step, carry, hidden, head, temperature):
    """Calls `step(carry, block) -> carry` for blocks that cover the vocabulary.

    All have one size: the last one begins early enough and has tokens of the one before again.
    """
    size = min(VOCABULARY_BLOCK, head.shape[0])

    def one_block(carry, index):
        start = jnp.minimum(index * size, head.shape[0] - size)
        rows = jax.lax.dynamic_slice_in_dim(head, start, size)
        ids = start + jnp.arange(size, dtype=jnp.int32)
        logits = contract("md,vd->mv", hidden, rows) / temperature
        return step(carry, _Block(logits, ids, ids >= index * size, rows)), None

    return jax.lax.scan(one_block, carry, jnp.arange(-(-head.shape[0] // size)))[0]


def _places(block: _Block, ids_M_K):
    """Returns where in a block the chosen tokens are, and which of them are new in it."""
    places = ids_M_K - block.ids[0]
    inside = (places >= 0) & (places < block.ids.shape[0])
    places = jnp.where(inside, places, 0)
    return places, inside & block.new[places]


def _others(block: _Block, ids_M_K):
    """Returns the mask `[M, B]` of a block's new tokens that are not among the chosen."""
    places, found = _places(block, ids_M_K)
    rows = jnp.arange(ids_M_K.shape[0])[:, None]
    outside = block.ids.shape[0]
    mask = jnp.broadcast_to(block.new, block.logits.shape)
    return mask.at[rows, jnp.where(found, places, outside)].set(False, mode="drop")


@jax.custom_vjp
def _split_logits(hidden, head, ids_M_K, temperature):
    """Returns the chosen tokens' logits `[M, K]`, and the log-sum-exp `[M]` of all others."""
    return _forward(hidden, head, ids_M_K, temperature)[0]


def _forward(hidden, head, ids_M_K, temperature):
    def step(carry, block):
        chosen, highest, total = carry
        places, found = _places(block, ids_M_K)
        chosen = jnp.where(found, jnp.take_along_axis(block.logits, places, axis=1), chosen)
        others = jnp.where(_others(block, ids_M_K), block.logits, -jnp.inf)
        higher = jnp.maximum(highest, others.max(-1))
        return chosen, higher, (total * jnp.exp(highest - higher)
                                + jnp.exp(others - higher[:, None]).sum(-1))

    zeros = jnp.zeros(ids_M_K.shape[:1], jnp.float32)
    chosen, highest, total = _walk(
        step, (jnp.zeros(ids_M_K.shape, jnp.float32),
               jnp.full_like(zeros, jnp.finfo(jnp.float32).min), zeros),
        hidden, head, temperature)
    rest = highest + jnp.log(total)
    return (chosen, rest), (hidden, head, ids_M_K, temperature, rest)


def _backward(residuals, cotangents):
    hidden, head, ids_M_K, temperature, rest = residuals
    d_chosen, d_rest = cotangents
    rows = jnp.arange(ids_M_K.shape[0])[:, None]

    def step(carry, block):
        d_hidden, d_head = carry
        others = _others(block, ids_M_K)
        shares = jnp.exp(jnp.where(others, block.logits - rest[:, None], -jnp.inf))
        places, found = _places(block, ids_M_K)
        d_logits = (shares * d_rest[:, None]).at[rows, places].add(
            jnp.where(found, d_chosen, 0.0)) / temperature
        d_rows = contract("mv,md->vd", d_logits, hidden.astype(head.dtype)).astype(head.dtype)
        earlier = jax.lax.dynamic_slice_in_dim(d_head, block.ids[0], len(block.ids))
        return (d_hidden + contract("mv,vd->md", d_logits, block.rows_of_head),
                jax.lax.dynamic_update_slice_in_dim(d_head, earlier + d_rows, block.ids[0], 0))

    d_hidden, d_head = _walk(
        step, (jnp.zeros_like(hidden, jnp.float32), jnp.zeros_like(head)), hidden, head,
        temperature)
    return d_hidden.astype(hidden.dtype), d_head, None, None


_split_logits.defvjp(_forward, _backward)
