"""The gated delta rule: a memory matrix a head, decayed, corrected and read at every token.

    S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - exp(g_t) S_(t-1)^T k_t))^T,    o_t = S_t^T q_t

(Gated Delta Networks, arXiv 2412.06464). Two forms of one function: token by token, which
decoding takes and which is the definition; and chunk by chunk, which known tokens take: what
happens within chunks is solved side by side, only the states go in sequence. All of it is float32
at the highest precision, since errors of a state last as long as the state.
"""

import jax
import jax.numpy as jnp
from flax import struct

from memcalib_jax.models import layers
from memcalib_jax.models.config import DeltaNet, ModelConfig

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


@struct.dataclass
class Chunks:
    """Stretches of tokens, solved as far as that goes without the state before them.

    Attributes:
      written: `[..., H, T, dv]`, what the tokens would write after an empty state.
      from_state: `[..., H, 2 T, dk]`: by what each token takes back of the state before, then by
        what each query reads of it.
      from_written: `[..., H, T + dk, T]`: how much of each token's write a query meets, then what
        it adds to the state at the end.
      kept: `[..., H]`, what is left of the state before at the end.
    """

    written: jax.Array
    from_state: jax.Array
    from_written: jax.Array
    kept: jax.Array


def solve_chunks(q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array,
                 beta: jax.Array) -> Chunks:
    """Solves chunks of tokens, all side by side.

    What a token writes depends on what the ones before it wrote: a unit triangular system.

    Args:
      q, k: float32 `[..., T, H, dk]`; v: float32 `[..., T, H, dv]`.
      log_decay, beta: float32 `[..., T, H]`; both 0 at a token that must leave no trace.
    """
    q, k, v = (x.swapaxes(-2, -3) for x in (q, k, v))
    log_decay, beta = log_decay.mT[..., None], beta.mT[..., None]
    size = q.shape[-2]
    up_to, after = jnp.tri(size), jnp.tri(size, k=-1)
    # Summed anew between any two tokens: a difference of sums from the start would carry their
    # rounding, which is large where little is left of the start.
    decay = jnp.where(up_to > 0, jnp.exp(_product(up_to, log_decay * after)), 0.0)
    from_start, to_end = jnp.exp(_product(up_to, log_decay)), decay[..., -1:, :].mT
    overlaps = _product(beta * k, k.mT) * decay
    solved = jax.scipy.linalg.solve_triangular(
        overlaps, jnp.concatenate([beta * v, beta * k * from_start], axis=-1),
        lower=True, unit_diagonal=True)
    written, taken_back = jnp.split(solved, [v.shape[-1]], axis=-1)
    met = _product(q, k.mT) * decay
    return Chunks(written, from_state=jnp.concatenate([taken_back, q * from_start], axis=-2),
                  from_written=jnp.concatenate([met, (k * to_end).mT], axis=-2),
                  kept=from_start[..., -1, 0])


def run_chunks(chunks: Chunks, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Feeds consecutive chunks to states; equals `recurrent` on their tokens.

    Args:
      chunks: leading axes `[n, ...]`, n chunks in order.
      state: float32 `[..., H, dk, dv]`, what came before.

    Returns:
      What is read, float32 `[n, ..., T, H, dv]`, and the states before each chunk and after the
      last, float32 `[n + 1, ..., H, dk, dv]`.
    """
    size = chunks.written.shape[-2]

    def one_chunk(state, chunk):
        taken_back, read = jnp.split(_product(chunk.from_state, state), 2, axis=-2)
        met, added = jnp.split(_product(chunk.from_written, chunk.written - taken_back), [size],
                               axis=-2)
        state = state * chunk.kept[..., None, None] + added
        return state, (read + met, state)

    _, (out, after) = jax.lax.scan(one_chunk, state, chunks)
    return out.swapaxes(-2, -3), jnp.concatenate([state[None], after])


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


def split_heads(mixed: jax.Array, net: DeltaNet) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts convolved channels into one query, key and value for each of the value heads.

    Queries and keys have length 1 (queries are then scaled by `key_dim ** -0.5`); each serves
    `num_value_heads / num_key_heads` value heads side by side.

    Args:
      mixed: float32 `[..., C]`: all queries, all keys, all values.
      net: numbers and sizes of heads.

    Returns:
      q and k, float32 `[..., H, dk]`; v `[..., H, dv]`.
    """
    keys = net.num_key_heads * net.key_dim
    q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
    lead = mixed.shape[:-1]
    q, k = (jnp.repeat(unit(x.reshape(*lead, net.num_key_heads, net.key_dim)),
                       net.num_value_heads // net.num_key_heads, axis=-2) for x in (q, k))
    return q * net.key_dim ** -0.5, k, v.reshape(*lead, net.num_value_heads, net.value_dim)


def project_delta(x: jax.Array, layer: dict, config: ModelConfig):
    """Returns what a delta net layer takes of the residual stream `x [..., D]`, all float32.

    Returns:
      The convolution's inputs `[..., C]`, log decays and betas `[..., H]`, and the gate of each
      head's output `[..., H, dv]`.
    """
    x = layers.norm(x, layer["attention_norm"], config)
    inputs, decay, beta, gate = (
        layers.project(x, layer, name) for name in ("qkv", "decay", "beta", "output_gate"))
    log_decay = -jnp.exp(layer["log_rate"].astype(jnp.float32)) * jax.nn.softplus(decay)
    return inputs, log_decay, jax.nn.sigmoid(beta), gate


def delta_output(x: jax.Array, mixed: jax.Array, gate: jax.Array, layer: dict,
                 config: ModelConfig) -> jax.Array:
    """Returns the stream `x [..., D]` plus the projected heads `mixed [..., H, dv]`, each
    normalized, then gated."""
    normal = layers.rms_norm(mixed, layer["value_norm"], config.norm_eps)
    return x + layers.project(normal * jax.nn.silu(gate), layer, "o", input_axes=2)
