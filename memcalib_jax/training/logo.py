"""Updates of the policy that builds memory: LoGo-GRPO on packed chats, Memory-R2, 3.2 and 3.3."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from memcalib_jax.credit import logo_loss, step_ratios
from memcalib_jax.memory.agents import Chat
from memcalib_jax.models import ModelConfig
from memcalib_jax.scoring.counterfactual import batch_log_probs, score_batch
from memcalib_jax.scoring.packing import Packing, ScoredBatch, bucket
from memcalib_jax.training.losses import added
from memcalib_jax.training.pairs import Pair, pack_pairs
from memcalib_jax.training.state import Frozen, OptimizerConfig, TrainState
from memcalib_jax.training.update import averaged, update


@dataclasses.dataclass(frozen=True)
class LogoConfig:
    """Constants of the objective.

    Attributes:
      clip: radius of the ratio's clip.
      dual_clip: bound of the loss at negative advantages.
      kl_weight: coefficient of the KL penalty to the frozen start.
      entropy_weight: coefficient of the entropy bonus.
      level: what weighs the same, "step" or "token".
      temperature: of the rollouts; log-probs are taken at it.
      compute_dtype: dtype of the matrix products' inputs.
      remat: what the backward pass computes again, one of `models.packed.REMAT`.
    """

    clip: float = 0.2
    dual_clip: float = 3.0
    kl_weight: float = 0.001
    entropy_weight: float = 0.001
    level: str = "step"
    temperature: float = 1.0
    compute_dtype: str = "bfloat16"
    remat: str = "layers"


@struct.dataclass
class LogoBatch:
    """One micro-batch: packed chats, and where their steps lie.

    A chat is one sequence; what its user says lies among its targets and belongs to no step.

    Attributes:
      scored: the chats, each with everything after its first prompt as targets.
      old_log_probs, reference_log_probs: float32 `[bins, M]`, nats.
      places_S_T: int32, places of the steps' tokens in the flattened `[bins, M]`.
      mask_S_T: bool, true at the steps' tokens.
      advantages_S: float32.
    """

    scored: ScoredBatch
    old_log_probs: jax.Array
    reference_log_probs: jax.Array
    places_S_T: jax.Array
    mask_S_T: jax.Array
    advantages_S: jax.Array


@struct.dataclass
class LogoSums:
    """Sums over steps, or over tokens; divide by `tokens` once per optimizer step.

    All float32 scalars. `loss` is the only one that carries a gradient.

    Attributes:
      loss: that of `logo_loss`.
      entropy: entropies of the next-token distributions over the steps' tokens, nats.
      step_tokens: the steps' tokens.
      max_ratio_error: largest |ratio - 1| of a step (a maximum, not a sum).
      tokens: how many units the loss is over.
    """

    loss: jax.Array
    entropy: jax.Array
    step_tokens: jax.Array
    max_ratio_error: jax.Array
    tokens: jax.Array

    def __add__(self, other: "LogoSums") -> "LogoSums":
        return added(self, other)

    def averages(self) -> dict[str, float]:
        """Returns the means under metric names, and the largest ratio error."""
        return {"loss/total": float(self.loss) / max(float(self.tokens), 1.0),
                "loss/entropy": float(self.entropy) / max(float(self.step_tokens), 1.0),
                "loss/max_ratio_error": float(self.max_ratio_error)}


def logo_sums(params: dict, config: ModelConfig, batch: LogoBatch,
              objective: LogoConfig) -> LogoSums:
    """Sums the objective over a micro-batch; `params` are those of the whole model."""
    log_probs, entropy, _ = batch_log_probs(
        params, config, batch.scored, objective.temperature, remat=objective.remat)
    new, old, reference, entropies = (values.reshape(-1)[batch.places_S_T] for values in (
        log_probs, batch.old_log_probs, batch.reference_log_probs, entropy))
    loss, count = logo_loss(
        new, old, reference, batch.advantages_S, batch.mask_S_T, clip=objective.clip,
        dual_clip=objective.dual_clip, kl=objective.kl_weight, level=objective.level,
        entropies_S_T=entropies, entropy_weight=objective.entropy_weight)
    ratios = jax.lax.stop_gradient(step_ratios(new, old, batch.mask_S_T))
    return LogoSums(
        loss=loss, entropy=jnp.sum(jnp.where(batch.mask_S_T, entropies, 0.0)),
        step_tokens=jnp.sum(batch.mask_S_T.astype(jnp.float32)),
        max_ratio_error=jnp.max(jnp.abs(ratios - 1.0)), tokens=count)


def pack_chats(config: ModelConfig, chats: Sequence[Chat], advantages: Sequence[float],
               old: dict, reference: dict, sizes: Sequence[int],
               temperature: float = 1.0) -> list[LogoBatch]:
    """Packs chats for the objective; equal first prompts are computed once.

    Args:
      config: the model's shape.
      chats: with tokens and at least one step each.
      advantages: one a chat, of all its steps.
      old, reference: parameters whose log-probs are taken here, in the training layout, so that
        the first ratio is 1.
      sizes: sizes that bins may have.
      temperature: of the rollouts.
    """
    packing = pack_pairs(config, [_pair(chat) for chat in chats], sizes)
    lists = _steps(packing, chats, advantages)
    rows = bucket(max(len(steps) for steps in lists), 8)
    width = bucket(max(end - start for chat in chats for start, end in chat.steps), 16)
    batches = []
    for scored, steps in zip(packing.batches, lists):
        places, mask = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool)
        values = np.zeros(rows, np.float32)
        for row, (first, length, advantage) in enumerate(steps):
            places[row, :length] = first + np.arange(length)
            mask[row, :length], values[row] = True, advantage
        old_log_probs, reference_log_probs = (
            score_batch(params, config, scored, temperature)[0] for params in (old, reference))
        batches.append(LogoBatch(scored, old_log_probs, reference_log_probs, places, mask, values))
    return batches


def _pair(chat: Chat) -> Pair:
    begin = chat.steps[0][0]
    return Pair(chat.tokens[:begin], chat.tokens[begin:])


def _steps(packing: Packing, chats, advantages):
    """Returns, for each batch, (place, length, advantage) of the steps in it."""
    lists = [[] for _ in packing.batches]
    for (batch, bin_, offset, _), chat, advantage in zip(packing.places[0], chats, advantages):
        first = bin_ * packing.bin_size + offset - chat.steps[0][0]
        lists[batch] += [(first + start, end - start, advantage) for start, end in chat.steps]
    return lists


def logo_update(state: TrainState, config: ModelConfig, chats: Sequence[Chat],
                advantages: Sequence[float], old: dict, reference: dict, objective: LogoConfig,
                optimizer: OptimizerConfig, sizes: Sequence[int], *, num_epochs: int,
                num_mini_batches: int, seed: int,
                frozen: Frozen = Frozen()) -> tuple[TrainState, dict[str, float]]:
    """Takes `num_epochs` passes over the chats, each in the same mini-batches.

    All old and reference log-probs are taken before the first update, which reuses the state's
    memory, in the layout of the updates. Chats without advantage are kept: they weigh in the mean
    and feel the KL penalty.

    Args:
      state: consumed.
      config: the model's shape.
      chats, advantages: what was generated, and what it is worth.
      old, reference: the policy that generated, and the frozen start, in the products' dtype.
      objective, optimizer: constants.
      sizes: sizes that bins may have.
      num_epochs, num_mini_batches: how the chats are used.
      seed: of the split into mini-batches.
      frozen: what completes `state.params`.

    Raises:
      FloatingPointError: loss or gradient is not finite.
    """
    order = np.random.default_rng(seed).permutation(len(chats))
    mini_batches = [
        pack_chats(config, [chats[i] for i in chosen], [advantages[i] for i in chosen], old,
                   reference, sizes, objective.temperature)
        for chosen in np.array_split(order, min(num_mini_batches, len(chats)))]
    jax.block_until_ready(mini_batches)
    all_metrics = []
    for _ in range(num_epochs):
        for batches in mini_batches:
            state, metrics = update(state, config, batches, objective, optimizer, frozen,
                                    logo_sums)
            all_metrics.append(metrics)
    return state, averaged(all_metrics)
