"""One optimizer step on a mini-batch: gradient sums over micro-batches, divided once."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from memcalib_jax.models import ModelConfig
from memcalib_jax.models.on_mesh import laid_out, layout_of
from memcalib_jax.scoring.counterfactual import batch_log_probs
from memcalib_jax.scoring.packing import ScoredBatch
from memcalib_jax.training.losses import ObjectiveSums, policy_objective
from memcalib_jax.training.state import Frozen, OptimizerConfig, TrainState, matrices_in


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """Constants of the objective.

    Attributes:
      clip: radius of the ratio's clip.
      kl_weight: coefficient of the KL penalty to the frozen start.
      temperature: of the rollouts; log-probs are taken at it.
      compute_dtype: dtype of the matrix products' inputs.
      remat: what the backward pass computes again, one of `models.packed.REMAT`.
    """

    clip: float = 0.2
    kl_weight: float = 0.01
    temperature: float = 1.0
    compute_dtype: str = "bfloat16"
    remat: str = "layers"


@struct.dataclass
class PolicyBatch:
    """One micro-batch: packed trees of prompts with their responses, and the learning signal.

    Attributes:
      scored: the trees and their response tokens.
      old_log_probs, reference_log_probs: float32 `[bins, M]`, nats.
      advantages: float32 `[bins, M]`.
      mask: bool `[bins, M]`, true at tokens of valid responses.
    """

    scored: ScoredBatch
    old_log_probs: jax.Array
    reference_log_probs: jax.Array
    advantages: jax.Array
    mask: jax.Array


def policy_sums(params: dict, config: ModelConfig, batch: PolicyBatch,
                objective: ObjectiveConfig) -> ObjectiveSums:
    """Sums the clipped objective over a micro-batch; `params` are those of the whole model."""
    log_probs, entropy, _ = batch_log_probs(
        params, config, batch.scored, objective.temperature, remat=objective.remat)
    return policy_objective(
        log_probs, batch.old_log_probs, batch.reference_log_probs, batch.advantages, batch.mask,
        entropy, clip=objective.clip, kl_weight=objective.kl_weight)


@functools.partial(jax.jit, static_argnames=("config", "objective", "measure", "layout"),
                   donate_argnums=(2,))
def _accumulate(params, frozen: Frozen, gradients, batch, config, objective, measure, layout):
    def loss(params):
        whole = matrices_in(frozen.combine(params), objective.compute_dtype)
        parts = measure(whole, config, batch, objective)
        return parts.loss, parts

    new, parts = jax.grad(loss, has_aux=True)(params)
    return laid_out(jax.tree.map(jnp.add, gradients, new), layout), parts


@functools.partial(jax.jit, static_argnames=("optimizer", "layout"), donate_argnums=(0,))
def _apply(state: TrainState, gradients, tokens, optimizer: OptimizerConfig, layout):
    gradients = jax.tree.map(lambda g: g / tokens, gradients)
    updates, opt_state = optimizer.build().update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return (laid_out(state.replace(params=params, opt_state=opt_state), layout),
            optax.tree.norm(gradients), optax.tree.norm(updates))


def gradient_sums(params: dict, config: ModelConfig, batches: Sequence[PolicyBatch],
                  objective: ObjectiveConfig, frozen: Frozen = Frozen(),
                  measure: Callable = policy_sums) -> tuple[dict, ObjectiveSums]:
    """Returns the summed gradient of the loss and the objective's sums, both float32.

    The gradient is that of `params`, which `frozen` completes. However the mini-batch is split
    into batches, the sums are the same.

    Another objective comes with its own `measure(params, config, batch, objective)`, whose sums
    add up and have `loss`, `tokens` and `averages()`; its settings have a `compute_dtype`.
    """
    gradients = jax.tree.map(jnp.zeros_like, params)
    layout, parts = layout_of(params), []
    for batch in batches:
        gradients, part = _accumulate(params, frozen, gradients, batch, config, objective, measure,
                                      layout)
        parts.append(part)
    return gradients, functools.reduce(operator.add, parts)


def update(state: TrainState, config: ModelConfig, batches: Sequence[PolicyBatch],
           objective: ObjectiveConfig, optimizer: OptimizerConfig, frozen: Frozen = Frozen(),
           measure: Callable = policy_sums) -> tuple[TrainState, dict[str, float]]:
    """Takes one optimizer step on the token mean over all batches of a mini-batch.

    A mini-batch without a valid token leaves the state as it is. The state given is consumed.
    `measure` is that of `gradient_sums`.

    Raises:
      FloatingPointError: loss or gradient is not finite.
    """
    gradients, sums = gradient_sums(state.params, config, batches, objective, frozen, measure)
    metrics = sums.averages()
    if not float(sums.tokens):
        return state, metrics | {"loss/grad_norm": 0.0, "loss/update_norm": 0.0}
    state, grad_norm, update_norm = _apply(state, gradients, sums.tokens, optimizer,
                                           layout_of(state))
    if not math.isfinite(metrics["loss/total"]) or not math.isfinite(float(update_norm)):
        raise FloatingPointError(
            f"training diverged: loss {metrics['loss/total']}, gradient norm {float(grad_norm)}; "
            "nothing of this step was saved. Lower the learning rate, or go on from the last "
            "checkpoint with other data")
    return state, metrics | {
        "loss/grad_norm": float(grad_norm), "loss/update_norm": float(update_norm)}


def averaged(all_metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the means of a step's updates, and the ratio error of the first.

    Only the first mini-batch meets the parameters that the old log-probs come from.
    """
    means = {name: float(np.mean([m[name] for m in all_metrics])) for name in all_metrics[0]}
    return means | {"loss/first_ratio_error": all_metrics[0]["loss/max_ratio_error"]}
