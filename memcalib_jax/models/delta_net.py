"""The gated delta rule: a memory matrix a head, decayed, corrected and read at every token.

    S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - exp(g_t) S_(t-1)^T k_t))^T,    o_t = S_t^T q_t

(Gated Delta Networks, arXiv 2412.06464). Two forms of one function: token by token, which
decoding takes and which is the definition; and chunk by chunk, which known tokens take. All of
it is float32 at the highest precision, since errors of a state last as long as the state.
"""

import jax
import jax.numpy as jnp
from flax import struct

CHUNK = 64
_PRECISION = jax.lax.Precision.HIGHEST


@struct.dataclass
class DeltaState:
    """All that a delta net layer knows of the tokens before.

    Attributes:
      memory: float32 `[..., H, dk, dv]`, each head's state.
      inputs: float32 `[..., width - 1, C]`, the convolution's last inputs, 0 where there are none.
    """

    memory: jax.Array
    inputs: jax.Array


def recurrent_step(state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array,
                   log_decay: jax.Array, beta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Feeds one token to each head's state.

    Args:
      state: float32 `[..., H, dk, dv]`.
      q, k: float32 `[..., H, dk]`; v: float32 `[..., H, dv]`.
      log_decay: float32 `[..., H]`, at most 0; beta: float32 `[..., H]`, in [0, 1].

    Returns:
      The state with the token in it and what the query reads from it, float32 `[..., H, dv]`.
    """
    state = state * jnp.exp(log_decay)[..., None, None]
    correction = beta[..., None] * (v - _read(state, k))
    state = state + k[..., :, None] * correction[..., None, :]
    return state, _read(state, q)


def _read(state, q):
    return jnp.einsum("...kv,...k->...v", state, q, precision=_PRECISION)


def recurrent(q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array,
              state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Feeds one sequence token by token.

    Args:
      q, k: float32 `[T, H, dk]`; v: float32 `[T, H, dv]`.
      log_decay, beta: float32 `[T, H]`; both 0 at a token that must leave no trace.
      state: float32 `[H, dk, dv]`, what came before.

    Returns:
      What is read, float32 `[T, H, dv]`, and the last state.
    """
    state, out = jax.lax.scan(lambda state, token: recurrent_step(state, *token), state,
                              (q, k, v, log_decay, beta))
    return out, state


def chunked(q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array,
            state: jax.Array, *, chunk: int = CHUNK) -> tuple[jax.Array, jax.Array]:
    """Feeds one sequence chunk by chunk; equals `recurrent`.

    Within a chunk, what each token writes depends on what the ones before it wrote: a unit
    triangular system, solved for all chunks side by side. Only the states go in sequence.

    Args:
      q, k, v, log_decay, beta, state: as of `recurrent`; T is a multiple of `chunk`.
      chunk: tokens of a chunk.

    Returns:
      What is read, float32 `[T, H, dv]`, and the states before each chunk and after the last,
      float32 `[T / chunk + 1, H, dk, dv]`.
    """
    def chunks(x):  # [T, H, ...] -> [T / chunk, H, chunk, ...]
        return x.reshape(-1, chunk, *x.shape[1:]).swapaxes(1, 2)

    q, k, v, log_decay, beta = (chunks(x) for x in (q, k, v, log_decay, beta))
    since_start = jnp.cumsum(log_decay, axis=-1)
    to_end = since_start[..., -1:] - since_start
    causal = jnp.tri(chunk, dtype=bool)
    between = jnp.where(causal, since_start[..., :, None] - since_start[..., None, :], 0.0)
    decay = jnp.where(causal, jnp.exp(between), 0.0)

    weighted_k = beta[..., None] * k
    overlaps = _product(weighted_k, k.mT) * decay
    from_start = jnp.exp(since_start)[..., None]
    solved = jax.scipy.linalg.solve_triangular(
        overlaps, jnp.concatenate([beta[..., None] * v, weighted_k * from_start], axis=-1),
        lower=True, unit_diagonal=True)
    written, read_before = jnp.split(solved, [v.shape[-1]], axis=-1)
    scores = _product(q, k.mT) * decay

    def one_chunk(state, parts):
        written, read_before, scores, q, k, kept = parts
        written = written - _product(read_before, state)
        out = _product(q, state) + _product(scores, written)
        state = state * kept[..., None, None] + _product(k.mT, written)
        return state, (out, state)

    parts = (written, read_before, scores, q * from_start, k * jnp.exp(to_end)[..., None],
             jnp.exp(since_start[..., -1]))
    _, (out, after) = jax.lax.scan(one_chunk, state, parts)
    out = out.swapaxes(1, 2).reshape(-1, *out.shape[1:2], out.shape[-1])
    return out, jnp.concatenate([state[None], after])


def _product(first, second):
    return jnp.matmul(first, second, precision=_PRECISION)


def convolve(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns SiLU of each channel's causal convolution.

    Args:
      inputs: float32 `[..., width - 1 + T, C]`: the `width - 1` inputs before the first token,
        0 where there are none, and those of the T tokens.
      kernel: `[width, C]`; its last row weighs a token's own input.

    Returns:
      float32 `[..., T, C]`.
    """
    width = kernel.shape[0]
    num_tokens = inputs.shape[-2] - (width - 1)
    kernel = kernel.astype(jnp.float32)
    return jax.nn.silu(sum(inputs[..., i:i + num_tokens, :] * kernel[i] for i in range(width)))


def unit(x: jax.Array) -> jax.Array:
    """Returns vectors `x [..., d]` at length 1; one near 0 stays near 0."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def split_heads(mixed: jax.Array, num_key_heads: int, num_value_heads: int, key_dim: int,
                value_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts convolved channels into one query, key and value a value head.

    Queries and keys have length 1 (queries then scaled by `key_dim ** -0.5`); each serves
    `num_value_heads / num_key_heads` value heads side by side.

    Args:
      mixed: float32 `[..., 2 * num_key_heads * key_dim + num_value_heads * value_dim]`.

    Returns:
      q and k, float32 `[..., num_value_heads, key_dim]`; v `[..., num_value_heads, value_dim]`.
    """
    keys = num_key_heads * key_dim
    q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
    lead = mixed.shape[:-1]
    q, k = (jnp.repeat(unit(x.reshape(*lead, num_key_heads, key_dim)),
                       num_value_heads // num_key_heads, axis=-2) for x in (q, k))
    return q * key_dim ** -0.5, k, v.reshape(*lead, num_value_heads, value_dim)
