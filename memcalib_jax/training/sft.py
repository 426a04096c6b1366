"""Supervised fine-tuning on demonstrations (4.1 and E.2, arXiv 2609.24259)."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from memcalib_jax.data import build_messages, prompt_batches, render
from memcalib_jax.data.demonstrations import Demonstration
from memcalib_jax.models import ModelConfig
from memcalib_jax.models.lora import LoraConfig
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.scoring.counterfactual import batch_log_probs, score_packing
from memcalib_jax.scoring.packing import ScoredBatch
from memcalib_jax.training.bin_sizes import SizeTable, UsedSizes
from memcalib_jax.training.pairs import Pair, pack_pairs
from memcalib_jax.training.runner import RunConfig, Stepped, run_steps
from memcalib_jax.training.state import OptimizerConfig, TrainState, matrices_in, split
from memcalib_jax.training.update import update


@dataclasses.dataclass(frozen=True)
class LikelihoodConfig:
    """Constants of the loss, minus the mean log-probability of a response token.

    Attributes:
      compute_dtype: dtype of the matrix products' inputs.
      remat: what the backward pass computes again, one of `models.packed.REMAT`.
    """

    compute_dtype: str = "bfloat16"
    remat: str = "layers"


@struct.dataclass
class LikelihoodSums:
    """Sums over response tokens, float32 scalars; divide by `tokens` once per optimizer step.

    Attributes:
      loss: minus the log-probabilities of the tokens, nats; carries the gradient.
      entropy: entropies of the next-token distributions, nats.
      tokens: response tokens.
    """

    loss: jax.Array
    entropy: jax.Array
    tokens: jax.Array

    def __add__(self, other: "LikelihoodSums") -> "LikelihoodSums":
        return jax.tree.map(jnp.add, self, other)

    def averages(self) -> dict[str, float]:
        """Returns the token means under metric names."""
        tokens = max(float(self.tokens), 1.0)
        return {"loss/total": float(self.loss) / tokens,
                "loss/entropy": float(self.entropy) / tokens}


def likelihood_sums(params: dict, config: ModelConfig, batch: ScoredBatch,
                    objective: LikelihoodConfig) -> LikelihoodSums:
    """Sums minus log p(y_t | prompt, y_<t) over the response tokens of a micro-batch."""
    log_probs, entropy, _ = batch_log_probs(params, config, batch, remat=objective.remat)
    mask = jnp.arange(batch.targets.shape[1]) < batch.counts[:, None]
    return LikelihoodSums(
        loss=-jnp.sum(jnp.where(mask, log_probs, 0.0)),
        entropy=jnp.sum(jnp.where(mask, entropy, 0.0)),
        tokens=jnp.sum(mask.astype(jnp.float32)))


def to_pair(tokenizer, config: ModelConfig, demonstration: Demonstration,
            representation: str) -> Pair:
    """Returns the tokens of a demonstration; the response ends with a stop token."""
    messages = build_messages(demonstration.record, representation=representation)
    response = tokenizer.encode(demonstration.response, add_special_tokens=False)
    # Of several tokens that stop a response, the tokenizer's own ends a turn of chat.
    own = tokenizer.eos_token_id
    stop = own if own in config.eos_ids else config.eos_ids[0]
    return Pair(tuple(render(tokenizer, messages)), (*response, stop))


def token_loss(params: dict, config: ModelConfig, pairs: Sequence[Pair],
               sizes: Sequence[int]) -> float:
    """Returns minus the mean log-probability of all response tokens of the pairs, in nats."""
    packing = pack_pairs(config, pairs, sizes)
    rows, = score_packing(params, config, packing)
    return -float(np.mean(np.concatenate(rows), dtype=np.float64))


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """What a step does, and how often the held-out loss is taken.

    Attributes:
      objective, optimizer: constants of the update.
      batch_size: pairs of an optimizer step.
      bin_tokens: about the most tokens of one device call's bin.
      eval_every: steps between evaluations; the last step has one.
    """

    objective: LikelihoodConfig
    optimizer: OptimizerConfig
    batch_size: int
    bin_tokens: int
    eval_every: int


def fine_tune(run: RunConfig, settings: SftConfig, start: dict, config: ModelConfig,
              pairs: Sequence[Pair], held_out: Sequence[Pair],
              report: Callable[[str], None] = functools.partial(print, flush=True), *,
              lora: LoraConfig | None = None) -> TrainState:
    """Trains from the newest checkpoint, or from `start`, to `run.num_steps`.

    Every epoch is a new permutation of the pairs. The loss of `held_out` is logged as `eval/loss`:
    before the first step, every `settings.eval_every` steps and after the last; without held-out
    pairs there is none.

    Args:
      run, settings: what to do.
      start, config: the model.
      pairs: at least `settings.batch_size`.
      held_out: pairs to evaluate on.
      report: takes one line of progress at a time.
      lora: trains a new adapter on the frozen start; None: all parameters.
    """
    trained, frozen = split(start, config, lora, jax.random.key(run.seed))
    stream = prompt_batches(pairs, num_prompts=settings.batch_size, seed=run.seed)
    sizes = SizeTable(settings.bin_tokens)

    def evaluate(state):
        if not held_out:
            return {}
        params = matrices_in(frozen.combine(state.params), settings.objective.compute_dtype)
        return {"eval/loss": token_loss(params, config, held_out, bin_sizes(settings.bin_tokens))}

    def one_step(state, step):
        since = time.monotonic()
        packing = pack_pairs(config, next(stream), sizes.allowed(step).training)
        sizes.note(UsedSizes(training={packing.bin_size}))
        state, values = update(state, config, packing.batches, settings.objective,
                               settings.optimizer, frozen, likelihood_sums)
        values["loss/learning_rate"] = float(settings.optimizer.rate(step - 1))
        values["time/tokens_per_second"] = packing.tree_tokens / (time.monotonic() - since)
        state = state.replace(step=state.step + 1)
        if step == run.num_steps or step % settings.eval_every == 0:
            values |= evaluate(state)
        return Stepped(state, values)

    return run_steps(run, trained, settings.optimizer,
                     {"pairs": stream, "bin_sizes": sizes}, one_step, _describe, report,
                     before=evaluate if held_out else None)


def _describe(values: dict[str, float]) -> str:
    parts = []
    if "loss/total" in values:
        parts.append(f"loss {values['loss/total']:.4f}")
    if "eval/loss" in values:
        parts.append(f"held-out loss {values['eval/loss']:.4f}")
    if "time/tokens_per_second" in values:
        parts.append(f"grad {values['loss/grad_norm']:.2f}  "
                     f"{values['time/tokens_per_second']:.0f} tok/s")
    return "  ".join(parts)
