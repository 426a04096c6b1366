"""Log-probabilities of chosen tokens without ever holding a row of logits.

The vocabulary is walked in blocks with a running maximum and sum, forward and backward, so that
the peak memory depends on the block and not on the vocabulary.
"""


import jax
import jax.numpy as jnp

from memcalib_jax.models.layers import contract

VOCABULARY_BLOCK = 8192


def token_log_probs(hidden_M_D: jax.Array, head_V_D: jax.Array, targets_M: jax.Array,
                    temperature: jax.Array | float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Returns log p(target) and the entropy of each row's distribution.

    `log softmax(hidden head^T / temperature)[target]`, reduced in float32 over blocks of the
    vocabulary.

    Args:
      hidden_M_D: float `[M, D]`, normalized hidden states that predict the targets.
      head_V_D: float `[V, D]`; products are in its dtype, sums in float32.
      targets_M: int `[M]`, ids in [0, V). Rows that nobody reads may hold any id in range.
      temperature: positive scalar.

    Returns:
      float32 `[M]` log-probs in nats, differentiable in hidden and head, and float32 `[M]`
      entropies in nats, which pass no gradient.
    """
    temperature = jnp.asarray(temperature, jnp.float32)
    log_probs, entropy = _log_probs(hidden_M_D, head_V_D, targets_M, temperature)
    return log_probs, jax.lax.stop_gradient(entropy)


def _block(head, index):
    """Returns block `index` of the head's rows, its row ids and which of them are new to it.

    The last block is moved back to end at the vocabulary's end; rows that the block before
    has had are not new.
    """
    vocabulary = head.shape[0]
    size = min(VOCABULARY_BLOCK, vocabulary)
    start = jnp.minimum(index * size, vocabulary - size)
    rows = start + jnp.arange(size)
    return jax.lax.dynamic_slice_in_dim(head, start, size), start, rows, rows >= index * size


def _num_blocks(head):
    return -(-head.shape[0] // min(VOCABULARY_BLOCK, head.shape[0]))


def _block_logits(hidden, block, new, temperature):
    logits = contract("md,vd->mv", hidden, block) / temperature
    return jnp.where(new, logits, -jnp.inf)


@jax.custom_vjp
def _log_probs(hidden, head, targets, temperature):
    return _forward(hidden, head, targets, temperature)[0]


def _forward(hidden, head, targets, temperature):
    def step(carry, index):
        maximum, total, weighted, chosen = carry
        block, _, rows, new = _block(head, index)
        logits = _block_logits(hidden, block, new, temperature)
        highest = jnp.maximum(maximum, logits.max(-1))
        shrink = jnp.exp(maximum - highest)
        weights = jnp.exp(logits - highest[:, None])
        total = total * shrink + weights.sum(-1)
        weighted = weighted * shrink + jnp.sum(weights * jnp.where(new, logits, 0.0), -1)
        chosen = chosen + jnp.sum(
            jnp.where((rows == targets[:, None]) & new, logits, 0.0), axis=-1)
        return (highest, total, weighted, chosen), None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    start = (jnp.full_like(zeros, jnp.finfo(jnp.float32).min), zeros, zeros, zeros)
    (maximum, total, weighted, chosen), _ = jax.lax.scan(
        step, start, jnp.arange(_num_blocks(head)))
    normalizer = maximum + jnp.log(total)
    outputs = chosen - normalizer, normalizer - weighted / total
    return outputs, (hidden, head, targets, temperature, normalizer)


def _backward(residuals, cotangents):
    hidden, head, targets, temperature, normalizer = residuals
    cotangent, _ = cotangents

    def step(carry, index):
        d_hidden, d_head = carry
        block, start, rows, new = _block(head, index)
        logits = _block_logits(hidden, block, new, temperature)
        probabilities = jnp.exp(logits - normalizer[:, None])
        is_target = (rows == targets[:, None]) & new
        d_logits = (is_target - probabilities) * (cotangent / temperature)[:, None]
        d_hidden = d_hidden + contract("mv,vd->md", d_logits, block)
        d_block = contract("mv,md->vd", d_logits, hidden.astype(head.dtype))
        seen = jax.lax.dynamic_slice_in_dim(d_head, start, d_block.shape[0])
        return (d_hidden, jax.lax.dynamic_update_slice_in_dim(
            d_head, seen + d_block, start, 0)), None

    start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32)
    (d_hidden, d_head), _ = jax.lax.scan(step, start, jnp.arange(_num_blocks(head)))
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), None, None


_log_probs.defvjp(_forward, _backward)
