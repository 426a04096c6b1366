"""A mixture of experts: each token passes the few experts that a router chooses for it.

No token is dropped. Where matrix products over groups of unequal size are fast, tokens are
sorted by expert and each expert sees its own; on a CPU every expert sees every token, and what
the router did not choose counts 0. Both give the same result.
"""

import jax
import jax.numpy as jnp

from memcalib_jax.models import layers
from memcalib_jax.models.config import Experts


def route(y: jax.Array, router: jax.Array, experts: Experts) -> tuple[jax.Array, jax.Array]:
    """Chooses each token's experts, in float32: the largest of a softmax over all experts.

    Args:
      y: float `[..., D]`, normalized.
      router: `[D, E]`.
      experts: how many there are, how many a token gets, and whether their weights sum to 1.

    Returns:
      Weights, float32 `[..., k]`, and experts, int32 `[..., k]`, the heaviest first.
    """
    logits = layers.contract("...d,de->...e", y, router.astype(jnp.float32))
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), experts.per_token)
    if experts.normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights, chosen


def load(chosen: jax.Array, mask: jax.Array, num_experts: int) -> jax.Array:
    """Returns the share of tokens that each expert gets: float32 `[E]`, `k / E` where even.

    Args:
      chosen: int32 `[..., k]`, the experts of each token.
      mask: bool `[...]`, the tokens that count; with none, every share is 0.
      num_experts: E.
    """
    hits = jax.nn.one_hot(chosen, num_experts, dtype=jnp.float32).sum(axis=-2)
    axes = tuple(range(mask.ndim))
    tokens = jnp.sum(mask, dtype=jnp.float32)
    return jnp.sum(hits, axis=axes, where=mask[..., None]) / jnp.maximum(tokens, 1)


def mixture(y: jax.Array, layer: dict, experts: Experts, *,
            grouped: bool | None = None) -> jax.Array:
    """Returns the weighted sum of each token's experts, plus the shared expert where there is one.

    Args:
      y: float `[..., D]`, normalized.
      layer: `router [D, E]`, `expert_gate`, `expert_up [E, D, F]`, `expert_down [E, F, D]`, and
        for a shared expert `shared_gate`, `shared_up`, `shared_down` and `shared_router [D]`.
      experts: their numbers.
      grouped: sort tokens by expert; None chooses what is fast on the default device.

    Returns:
      float32 `[..., D]`.
    """
    if grouped is None:
        grouped = jax.default_backend() != "cpu"
    weights, chosen = route(y, layer["router"], experts)
    tokens = y.reshape(-1, y.shape[-1])
    weights, chosen = (x.reshape(len(tokens), -1) for x in (weights, chosen))
    mixed = (_sorted_by_expert if grouped else _one_expert_at_a_time)(
        tokens, weights, chosen, layer)
    mixed = mixed.reshape(y.shape)
    if experts.shared_size:
        gate = jax.nn.sigmoid(layers.project(y, layer, "shared_router"))
        mixed = mixed + gate[..., None] * layers.gated(y, layer, "shared_")
    return mixed


def _sorted_by_expert(tokens, weights, chosen, layer):
    per_token, num_experts = chosen.shape[1], layer["expert_gate"].shape[0]
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=num_experts).astype(jnp.int32)

    def products(x, weight):
        precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
        return jax.lax.ragged_dot(x.astype(weight.dtype), weight, sizes, precision=precision,
                                  preferred_element_type=jnp.float32)

    x = tokens.astype(layer["expert_gate"].dtype)[order // per_token]
    gate = jax.nn.silu(products(x, layer["expert_gate"]))
    out = products(gate * products(x, layer["expert_up"]), layer["expert_down"])
    # Back in the order of the tokens, so that their experts are summed without a scatter.
    by_token = out[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.sum(by_token * weights[..., None], axis=1)


def _one_expert_at_a_time(tokens, weights, chosen, layer):
    names = ("gate", "up", "down")

    @jax.checkpoint
    def add_expert(total, scanned):
        number, expert = scanned
        weight = jnp.sum(jnp.where(chosen == number, weights, 0.0), axis=1)
        return total + weight[:, None] * layers.gated(tokens, expert), None

    stacked = {name: layer[f"expert_{name}"] for name in names}
    total, _ = jax.lax.scan(add_expert, jnp.zeros(tokens.shape, jnp.float32),
                            (jnp.arange(len(stacked["gate"])), stacked))
    return total
