"""One forward for known tokens: packed rows and trees of segments."""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from memcalib_jax.models import experts, layers
from memcalib_jax.models.attention import Segments, packed_attention
from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.delta_net import delta_output, project_delta
from memcalib_jax.models.mlp import mlp
from memcalib_jax.models.on_mesh import constrained, rows_spec
from memcalib_jax.models.packed_delta import lay_out, packed_delta
from memcalib_jax.models.stack import scan_layers
from memcalib_jax.models.tile_attention import ATTENTION_RESULTS


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
        query_size=size)
    positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
    return Packed(tokens.astype(jnp.int32), positions, (segments,))


def in_segments(packed: Packed) -> jax.Array:
    """Returns which places belong to a segment: bool `[bins, N]`."""
    place = jnp.arange(packed.tokens.shape[1])

    def within(group: Segments):
        first = group.start[..., None]
        return jnp.any((place >= first) & (place < first + group.length[..., None]), axis=1)

    return functools.reduce(jnp.logical_or, map(within, packed.segments))


# What a backward pass computes again instead of keeping it: nothing; what is cheap, so that only
# the results of matrix products and of attention are kept; whole layers.
REMAT = ("none", "elementwise", "layers")


def hidden_states(params: dict, config: ModelConfig, packed: Packed, *,
                  remat: str = "none") -> jax.Array:
    """Returns the normalized last hidden states of packed tokens: float32 `[bins, N, D]`.

    Args:
      params: tree of `config.parameter_shapes()`; its dtype is the dtype of the products.
      packed: tokens and layout. A token of no segment gets a finite value without meaning.
      remat: one of `REMAT`, what the backward pass computes again.
    """
    return _run(params, config, packed, remat=remat)[0]


def hidden_states_and_load(params: dict, config: ModelConfig, packed: Packed, *,
                           remat: str = "none") -> tuple[jax.Array, jax.Array | None]:
    """Returns `hidden_states`, and how many tokens each expert of each layer got.

    The latter is float32 `[L, E]`, the attention layers before the delta net layers as in the
    parameters, and counts the tokens of segments alone; None for a model without experts.
    """
    hidden, _, load = _run(params, config, packed, remat=remat, count_load=True)
    return hidden, load


def prefill(params: dict, config: ModelConfig, packed: Packed):
    """Returns what decoding after plain rows needs: one segment a bin.

    Returns:
      The hidden states; k and v of every attention layer, `[L, bins, N, K, d]` each; and the
      `DeltaState` of every delta net layer after each row, with leading axes `[L, bins]`, None
      for a model without such layers.
    """
    hidden, cache, _ = _run(params, config, packed, keep_cache=True)
    states = jax.tree.map(lambda x: x[:, :, 0], cache.get("delta"))
    return hidden, *cache["attention"], states


def _run(params, config, packed, *, remat="none", keep_cache=False, count_load=False):
    """Returns hidden states, and by need each kind of layer's cache and each layer's load."""
    def attention_step(x, layer):
        q, k, v, gate = layers.project_qkv(x, packed.positions, layer, config)
        x = layers.attention_output(x, packed_attention(q, k, v, packed.segments), gate, layer)
        return finish(x, layer, (k, v))

    def delta_step(x, layer):
        inputs, log_decay, beta, gate = project_delta(x, layer, config)
        mixed, state = packed_delta(inputs, log_decay, beta, layer["conv"], layout, config.delta)
        x = delta_output(x, mixed, gate, layer, config)
        return finish(x, layer, state)

    def finish(x, layer, cache):
        x, chosen = mlp(x, layer, config)
        x = constrained(x, bins)
        load = (experts.load(chosen, counted, config.experts.count)
                if chosen is not None and count_load else None)
        return x, (cache if keep_cache else None, load)

    bins = rows_spec(packed.tokens.shape[0])
    counted = in_segments(packed) if count_load else None
    layout = lay_out(packed.segments, config.delta) if config.delta else None
    steps = {"attention": attention_step, "delta": delta_step}
    steps = {kind: _rematerialized(step, remat) for kind, step in steps.items()}
    x, outputs = scan_layers(
        config.layer_pattern, steps, constrained(layers.embed(params, packed.tokens), bins),
        {"attention": params["layers"], "delta": params.get("delta_layers")})
    cache, loads = ({kind: output[i] for kind, output in outputs.items()} for i in (0, 1))
    loads = [loads[kind] for kind in ("attention", "delta") if loads.get(kind) is not None]
    return (layers.norm(x, params["final_norm"], config), cache,
            jnp.concatenate(loads) if loads else None)


def _rematerialized(step, remat: str):
    policies = jax.checkpoint_policies
    if remat == "none":
        return step
    if remat == "elementwise":
        return jax.checkpoint(step, policy=policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable,
            policies.save_only_these_names(ATTENTION_RESULTS)))
    return jax.checkpoint(step)


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
