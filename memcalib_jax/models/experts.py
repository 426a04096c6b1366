"""A mixture of experts: each token passes the few experts that a router chooses for it."""

import jax
import jax.numpy as jnp

from memcalib_jax.models import layers
from memcalib_jax.models.config import Experts
from memcalib_jax.models.expert_products import products
from memcalib_jax.models.on_mesh import platform


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
    """Returns how many tokens each expert gets: float32 `[E]`, whose sum is tokens times k.

    Args:
      chosen: int32 `[..., k]`, the experts of each token.
      mask: bool `[...]`, the tokens that count.
      num_experts: E.
    """
    hits = jax.nn.one_hot(chosen, num_experts, dtype=jnp.float32).sum(axis=-2)
    return jnp.sum(hits, axis=tuple(range(mask.ndim)), where=mask[..., None])


def mixture(y: jax.Array, layer: dict, experts: Experts, *,
            grouped: bool | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of each token's experts, plus the shared expert where there is one.

    Experts may lie on several devices: see `expert_products.products`.

    Args:
      y: float `[..., D]`, normalized.
      layer: `router [D, E]`, `expert_gate`, `expert_up [E, D, F]`, `expert_down [E, F, D]`, and
        for a shared expert `shared_gate`, `shared_up`, `shared_down` and `shared_router [D]`.
      experts: their numbers.
      grouped: sort tokens by expert; None chooses what is fast on the devices it runs on.

    Returns:
      float32 `[..., D]`, and the experts of each token, int32 `[..., k]`.
    """
    if grouped is None:
        grouped = platform() != "cpu"
    weights, chosen = route(y, layer["router"], experts)
    flat = (x.reshape(-1, x.shape[-1]) for x in (y, weights, chosen))
    matrices = tuple(layer[f"expert_{name}"] for name in ("gate", "up", "down"))
    mixed = products(*flat, matrices, grouped=grouped).reshape(y.shape)
    if experts.shared_size:
        gate = jax.nn.sigmoid(layers.project(y, layer, "shared_router"))
        mixed = mixed + gate[..., None] * layers.gated(y, layer, "shared_")
    return mixed, chosen
