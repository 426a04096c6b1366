"""One forward for known tokens: packed rows and trees of segments."""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from memcalib_jax.models import layers
from memcalib_jax.models.attention import Segments, packed_attention
from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.delta_net import delta_output, project_delta
from memcalib_jax.models.mlp import mlp
from memcalib_jax.models.packed_delta import lay_out, packed_delta
from memcalib_jax.models.stack import scan_layers


@struct.dataclass
class Packed:
    """Tokens of many segments, laid end to end in bins of equal size.

    Attributes:
      tokens: int32 `[bins, N]`; places that belong to no segment may hold any id.
      positions: int32 `[bins, N]`, a token's place in its own sequence, ancestors included.
      segments: the attention layout, grouped by static shape. Where a model has delta net layers,
        ancestors lie in earlier groups, and others leave a segment only at multiples of
        `delta_net.CHUNK` tokens or at its end.
    """

    tokens: jax.Array
    positions: jax.Array
    segments: tuple[Segments, ...]


def plain_rows(tokens: jax.Array, lengths: jax.Array) -> Packed:
    """Returns right-padded rows `tokens [B, S]` of `lengths [B]` as one segment a bin."""
    rows, size = tokens.shape
    no_ancestor = jnp.zeros((rows, 1, 1), jnp.int32)
    segments = Segments(
        start=jnp.zeros((rows, 1), jnp.int32), length=lengths[:, None].astype(jnp.int32),
        ancestor_start=no_ancestor, ancestor_length=no_ancestor,
        query_size=size, context_size=0)
    positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
    return Packed(tokens.astype(jnp.int32), positions, (segments,))


def hidden_states(params: dict, config: ModelConfig, packed: Packed, *,
                  remat: bool = False) -> jax.Array:
    """Returns the normalized last hidden states of packed tokens: float32 `[bins, N, D]`.

    Args:
      params: tree of `config.parameter_shapes()`; its dtype is the dtype of the products.
      packed: tokens and layout. A token of no segment gets a finite value without meaning.
      remat: recompute each layer in the backward pass instead of keeping its activations.
    """
    return _run(params, config, packed, remat=remat, keep_cache=False)[0]


def prefill(params: dict, config: ModelConfig, packed: Packed):
    """Returns what decoding after plain rows needs: one segment a bin.

    Returns:
      The hidden states; k and v of every attention layer, `[L, bins, N, K, d]` each; and the
      `DeltaState` of every delta net layer after each row, with leading axes `[L, bins]`, None
      for a model without such layers.
    """
    hidden, cache = _run(params, config, packed, remat=False, keep_cache=True)
    states = jax.tree.map(lambda x: x[:, :, 0], cache.get("delta"))
    return hidden, *cache["attention"], states


def _run(params, config, packed, *, remat, keep_cache):
    def attention_step(x, layer):
        q, k, v, gate = layers.project_qkv(x, packed.positions, layer, config)
        x = layers.attention_output(x, packed_attention(q, k, v, packed.segments), gate, layer)
        return mlp(x, layer, config), ((k, v) if keep_cache else None)

    def delta_step(x, layer):
        inputs, log_decay, beta, gate = project_delta(x, layer, config)
        mixed, state = packed_delta(inputs, log_decay, beta, layer["conv"], layout, config.delta)
        x = delta_output(x, mixed, gate, layer, config)
        return mlp(x, layer, config), (state if keep_cache else None)

    layout = lay_out(packed.segments, config.delta) if config.delta else None
    steps = {"attention": attention_step, "delta": delta_step}
    if remat:
        steps = {kind: jax.checkpoint(step) for kind, step in steps.items()}
    x, cache = scan_layers(
        config.layer_pattern, steps, layers.embed(params, packed.tokens),
        {"attention": params["layers"], "delta": params.get("delta_layers")})
    return layers.norm(x, params["final_norm"], config), cache


@functools.partial(jax.jit, static_argnames="config")
def logits(params: dict, config: ModelConfig, tokens_B_S: jax.Array,
           lengths_B: jax.Array) -> jax.Array:
    """Returns every logit of right-padded rows, for tests and small inputs.

    Args:
      params: tree of `config.parameter_shapes()`.
      config: the model's shape.
      tokens_B_S: int `[B, S]`, right-padded with any id.
      lengths_B: int `[B]`, valid tokens of each row; logits beyond them are finite and
        without meaning.

    Returns:
      float32 `[B, S, V]`; `[b, s]` predicts token s + 1.
    """
    hidden = hidden_states(params, config, plain_rows(tokens_B_S, lengths_B))
    return layers.contract("...d,vd->...v", hidden, layers.head_matrix(params))
