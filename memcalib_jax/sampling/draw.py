"""Drawing one token from logits: temperature, truncation and the inverse of the cumulative sum."""

import jax
import jax.numpy as jnp
from flax import struct

NUM_BLOCKS = 256


@struct.dataclass
class Rule:
    """How tokens are drawn; numbers are leaves, so that another value does not recompile.

    Attributes:
      temperature: positive; None is greedy, whose log-probs are those at temperature 1.
      top_p: keep the most likely tokens that hold this mass together; None keeps all.
      top_k: keep this many most likely tokens, before `top_p`; None keeps all.
    """

    temperature: float | None = 1.0
    top_p: float | None = None
    top_k: int | None = None


def uniforms(key: jax.Array, request_ids: jax.Array, sample_ids: jax.Array,
             positions: jax.Array) -> jax.Array:
    """Returns a number strictly between 0 and 1 for each (request, sample, position).

    Args:
      key: a random key.
      request_ids, sample_ids, positions: integers of one shape `[...]`.

    Returns:
      float32 `[...]`, the middles of 2^23 equal intervals: float32 holds them all exactly, and
      none of them is 0 or 1. Each depends on its own three numbers and the key alone.
    """
    def one(request, sample, position):
        own = jax.random.fold_in(jax.random.fold_in(key, request), sample)
        bits = jax.random.bits(jax.random.fold_in(own, position), dtype=jnp.uint32)
        return ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0 ** -23

    drawn = jax.vmap(one)(request_ids.ravel(), sample_ids.ravel(), positions.ravel())
    return drawn.reshape(request_ids.shape)


def _first_above(cumulative, weights, target):
    """Returns the first index of positive weight above the target, else the last positive."""
    positive = weights > 0
    above = (cumulative > target[..., None]) & positive
    last = weights.shape[-1] - 1 - jnp.argmax(positive[..., ::-1], axis=-1)
    return jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last)


def invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Returns the token at which the cumulative share of the weights passes a uniform number.

    The sum has two levels, over a fixed number of blocks and inside the chosen one: one float32
    sum over a whole vocabulary loses the small tokens and may even fall. A token of weight 0 is
    never returned, and the token never falls as the uniform number rises.

    Args:
      weights: float32 `[..., V]`, not negative, some positive; of any sum.
      uniform: float32 `[...]` in (0, 1).

    Returns:
      int32 `[...]`.
    """
    vocabulary = weights.shape[-1]
    size = -(-vocabulary // NUM_BLOCKS)
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, NUM_BLOCKS * size - vocabulary)]
    blocks = jnp.pad(weights, padding).reshape(*weights.shape[:-1], NUM_BLOCKS, size)
    sums = jnp.sum(blocks, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = uniform * ends[..., -1]
    block = _first_above(ends, sums, target)

    def at_block(x):
        return jnp.take_along_axis(x, block[..., None], axis=-1)[..., 0]

    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    cumulative = jnp.cumsum(inside, axis=-1)
    # As a share of the block: its end in `ends` and the sum of its tokens round differently,
    # and its last token, however unlikely, must not take the difference.
    end = at_block(ends)
    start = jnp.where(block > 0, at_block(jnp.roll(ends, 1, axis=-1)), 0.0)
    width = jnp.maximum(end - start, jnp.finfo(jnp.float32).tiny)
    share = jnp.maximum(target - start, 0.0) / width
    return block * size + _first_above(cumulative, inside, share * cumulative[..., -1])


def _keep_largest(weights, measure, wanted):
    """Zeroes all but the largest weights whose measures reach `wanted` together.

    The least weight kept is found bit by bit: floats that are not negative order as their bits
    do. A float32 sum over more tokens is never smaller, since rounding is monotone, so the
    search is exact. Ties with the least weight kept are all kept.
    """
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)

    def next_bit(i, least):
        candidate = least | (1 << (29 - i))
        reached = jnp.sum(jnp.where(bits >= candidate[..., None], measure, 0.0), axis=-1)
        return jnp.where(reached >= wanted, candidate, least)

    # Weights are at most 1, whose highest set bit is 29.
    least = jax.lax.fori_loop(0, 30, next_bit, jnp.zeros(weights.shape[:-1], jnp.int32))
    return jnp.where(bits >= least[..., None], weights, 0.0)


def truncate(weights: jax.Array, rule: Rule) -> jax.Array:
    """Zeroes the weights `[..., V]` (at most 1) that top-k and then top-p leave out.

    Top-p keeps the fewest most likely tokens whose mass among the top-k is at least `top_p`.
    Tokens exactly as likely as the last one kept are kept too, in both: which tokens survive
    does not depend on their ids.
    """
    if rule.top_k is not None:
        count = jnp.asarray(rule.top_k, jnp.float32)
        weights = _keep_largest(weights, jnp.ones_like(weights), count)
    if rule.top_p is not None:
        weights = _keep_largest(weights, weights, rule.top_p * jnp.sum(weights, axis=-1))
    return weights


def draw(logits: jax.Array, uniform: jax.Array, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """Draws a token from each row of logits.

    Args:
      logits: float32 `[..., V]`; -inf for a token that must not be drawn.
      uniform: float32 `[...]` in (0, 1); greedy rules ignore it.
      rule: temperature and truncation.

    Returns:
      tokens, int32 `[...]`, and their log-probs, float32 `[...]` in nats, under the whole
      distribution at the rule's temperature: truncation moves the draw, not the log-prob.
    """
    if rule.temperature is not None:
        logits = logits / rule.temperature
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(shifted)
    if rule.temperature is None:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        tokens = invert(truncate(weights, rule), uniform)
    chosen = jnp.take_along_axis(shifted, tokens[..., None], axis=-1)[..., 0]
    return tokens.astype(jnp.int32), chosen - jnp.log(jnp.sum(weights, axis=-1))
