"""Log-probabilities of chosen tokens without ever holding a row of logits.

The vocabulary is walked in blocks, forward and backward, so that the peak memory depends on the
block and not on the vocabulary. Blocks of rows are summed up apart and merged, and so are the
shards of a vocabulary that is spread over devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcalib_jax.models.layers import contract

# A block's float32 logits for a tile of rows take 4 MiB, which caches hold.
ROW_TILE = 512
VOCABULARY_BLOCK = 2048


def token_log_probs(hidden_M_D: jax.Array, head_V_D: jax.Array, targets_M: jax.Array,
                    temperature: jax.Array | float = 1.0, *, axis_name: str | None = None,
                    count: jax.Array | int | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns log p(target) and the entropy of each row's distribution.

    `log softmax(hidden head^T / temperature)[target]`, reduced in float32 over blocks of the
    vocabulary.

    Args:
      hidden_M_D: float `[M, D]`, normalized hidden states that predict the targets.
      head_V_D: float `[V, D]`; products are in its dtype, sums in float32.
      targets_M: int `[M]`, ids in [0, V). Rows that nobody reads may hold any id in range.
      temperature: positive scalar.
      axis_name: the mapped axis (inside shard_map) over which the vocabulary is spread in
        equal shards, in order: the head, and its gradient, are then the device's own shard
        `[V / devices, D]`, while hidden, targets and results are the same on every device of
        the axis, and targets are ids in the whole vocabulary. Where rows are spread over
        further axes, cast the head to vary over them (`jax.lax.pcast`). Leave it None under
        plain jit.
      count: int scalar, None for M: rows from there on are not wanted. They get finite values
        without meaning, pass no gradient, and cost little.

    Returns:
      float32 `[M]` log-probs and float32 `[M]` entropies, in nats, both differentiable in hidden
      and head.
    """
    temperature = jnp.asarray(temperature, jnp.float32)
    rows = targets_M.shape[0]
    count = rows if count is None else count
    hidden_M_D, targets_M = _whole_tiles(hidden_M_D), _whole_tiles(targets_M)
    if axis_name is None:
        whole = _summary(hidden_M_D, head_V_D, targets_M, temperature, count)
    else:
        first = jax.lax.axis_index(axis_name) * head_V_D.shape[0]
        hidden = jax.lax.pcast(hidden_M_D, axis_name, to="varying")
        whole = _over_devices(
            _summary(hidden, head_V_D, targets_M - first, temperature, count), axis_name)
    log_probs, entropy = whole.chosen - whole.normalizer, whole.normalizer - whole.mean
    return log_probs[:rows], entropy[:rows]


class _Summary(NamedTuple):
    """What some tokens' logits say, float32 `[M]` each.

    Attributes:
      normalizer: log of the sum of their exponentials.
      mean: their mean under their own distribution.
      chosen: the target's logit; 0 where the target is not among them.
    """

    normalizer: jax.Array
    mean: jax.Array
    chosen: jax.Array


def _over_devices(part, axis_name):
    highest = jax.lax.pmax(jax.lax.stop_gradient(part.normalizer), axis_name)
    share = jnp.exp(part.normalizer - highest)
    total = jax.lax.psum(share, axis_name)
    return _Summary(highest + jnp.log(total), jax.lax.psum(share * part.mean, axis_name) / total,
                    jax.lax.psum(part.chosen, axis_name))


def _whole_tiles(x):
    rows = x.shape[0]
    rest = -rows % min(ROW_TILE, rows)
    return jnp.pad(x, [(0, rest)] + [(0, 0)] * (x.ndim - 1))


def _walk(step, carry, head):
    """Calls `step(carry, block, start) -> carry` for each block of the head's rows."""
    size = VOCABULARY_BLOCK
    count, rest = divmod(head.shape[0], size)

    def whole(carry, index):
        block = jax.lax.dynamic_slice_in_dim(head, index * size, size)
        return step(carry, block, index * size), None

    if count:
        carry, _ = jax.lax.scan(whole, carry, jnp.arange(count))
    return step(carry, head[count * size:], count * size) if rest else carry


def _each_tile(step, carry, total, inputs, count):
    """Calls `step(rows of carry, rows of inputs) -> rows, part` for the first `count` rows.

    Rows are taken a tile at a time, so that those beyond the last tile cost nothing. Returns the
    carry with the rows put back, and `total` with the parts added.
    """
    tile = min(ROW_TILE, inputs[0].shape[0])

    def take(trees, index):
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, index * tile, tile), trees)

    def one_tile(index, carried):
        carry, total = carried
        slices, part = step(take(carry, index), take(inputs, index))
        carry = jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(
            x, new, index * tile, 0), carry, slices)
        return carry, jax.tree.map(jnp.add, total, part)

    return jax.lax.fori_loop(0, -(-count // tile), one_tile, (carry, total))


def _block_logits(hidden, block, temperature):
    return contract("md,vd->mv", hidden, block) / temperature


def _is_target(block, targets, start):
    return start + jnp.arange(block.shape[0]) == targets[:, None]


@jax.custom_vjp
def _summary(hidden, head, targets, temperature, count):
    return _forward(hidden, head, targets, temperature, count)[0]


def _forward(hidden, head, targets, temperature, count):
    def step(carry, block, start):
        def tile(carry, inputs):
            maximum, total, weighted, chosen = carry
            hidden, targets = inputs
            logits = _block_logits(hidden, block, temperature)
            highest = jnp.maximum(maximum, logits.max(-1))
            shrink = jnp.exp(maximum - highest)
            weights = jnp.exp(logits - highest[:, None])
            found = jnp.where(_is_target(block, targets, start), logits, 0.0)
            return (highest, total * shrink + weights.sum(-1),
                    weighted * shrink + jnp.sum(weights * logits, -1),
                    chosen + found.sum(-1)), ()

        return _each_tile(tile, carry, (), (hidden, targets), count)[0]

    zeros = jnp.zeros_like(hidden[:, 0], jnp.float32)
    maximum, total, weighted, chosen = _walk(
        step, (jnp.full_like(zeros, jnp.finfo(jnp.float32).min), zeros, zeros, zeros), head)
    total = jnp.where(total > 0, total, 1.0)  # rows that no tile reached stay finite
    summary = _Summary(maximum + jnp.log(total), weighted / total, chosen)
    return summary, (hidden, head, targets, temperature, count, summary)


def _backward(residuals, cotangents):
    hidden, head, targets, temperature, count, summary = residuals

    def step(carry, block, start):
        def tile(d_hidden, inputs):
            hidden, targets, normalizer, mean, d_normalizer, d_mean, d_chosen = inputs
            logits = _block_logits(hidden, block, temperature)
            probabilities = jnp.exp(logits - normalizer[:, None])
            chosen = jnp.where(_is_target(block, targets, start), d_chosen[:, None], 0.0)
            # d mean / d logit = p (1 + logit - mean): its weights are the logits' own.
            shared = d_normalizer[:, None] + d_mean[:, None] * (1.0 + logits - mean[:, None])
            d_logits = (chosen + probabilities * shared) / temperature
            return (d_hidden + contract("mv,vd->md", d_logits, block),
                    contract("mv,md->vd", d_logits, hidden.astype(head.dtype)))

        d_hidden, d_head = carry
        d_hidden, d_block = _each_tile(
            tile, d_hidden, jnp.zeros_like(block, jnp.float32),
            (hidden, targets, summary.normalizer, summary.mean, cotangents.normalizer,
             cotangents.mean, cotangents.chosen), count)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(
            d_head, d_block.astype(head.dtype), start, 0)

    start = jnp.zeros_like(hidden, jnp.float32), jnp.zeros_like(head)
    d_hidden, d_head = _walk(step, start, head)
    return d_hidden.astype(hidden.dtype), d_head, None, None, None


_summary.defvjp(_forward, _backward)
