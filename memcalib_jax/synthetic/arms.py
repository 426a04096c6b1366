"""The arms of a study: a way to assign credit with its KL weight, and a run of one seed."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable

import jax
import numpy as np

from memcalib_jax.api import BackgroundLoop
from memcalib_jax.credit import CreditConfig
from memcalib_jax.credit.localization import MODES
from memcalib_jax.evaluation import calibration_metrics
from memcalib_jax.synthetic.judge import ExactJudge, use_levels
from memcalib_jax.synthetic.records import draw_records, value_of
from memcalib_jax.synthetic.responses import MAX_TOKENS
from memcalib_jax.training.advantages import METHODS, ScoringConfig
from memcalib_jax.training.loop import LoopConfig, train
from memcalib_jax.training.rollouts import (
    Policy, Prompt, SamplingConfig, render_prompts, roll_out)
from memcalib_jax.training.runner import RunConfig
from memcalib_jax.training.state import OptimizerConfig, TrainState
from memcalib_jax.training.step import StepConfig
from memcalib_jax.training.update import ObjectiveConfig

_TRAINING, _EVALUATION = 5, 6  # numbers of the draws of a seed


@dataclasses.dataclass(frozen=True)
class Arm:
    """A method, for memcalib also a mode, and the weight of its KL penalty."""

    method: str
    mode: str
    kl: float

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Reads `grpo@0.05`, `memcalib@0.05`, or a mode of memcalib as `guarded@0.05`.

        Raises:
          ValueError: it is none of these.
        """
        name, _, kl = text.partition("@")
        method, mode = (name, "ordered") if name in METHODS else ("memcalib", name)
        if mode not in MODES or not re.fullmatch(r"\d+(\.\d+)?", kl):
            names = [*METHODS, *(mode for mode in MODES if mode != "ordered")]
            raise ValueError(f"{text!r} is no arm: give one of {', '.join(names)}, then @ and the "
                             "KL weight, such as memcalib@0.05")
        return cls(method, mode, float(kl))

    @property
    def name(self) -> str:
        """The method's or the mode's own name, which `parse` reads."""
        return self.method if self.mode == "ordered" else self.mode

    def __str__(self):
        return f"{self.name}@{self.kl:g}"


@dataclasses.dataclass(frozen=True)
class Training:
    """What all arms share.

    Attributes:
      num_steps: steps of each run.
      num_prompts, group_size: a step's prompts, and the responses to each.
      mini_batch_size: responses of an optimizer step.
      learning_rate: constant, of AdamW.
      train_records: drawn for a seed; with the numbers here no step meets one twice.
      eval_every: steps between evaluations and between checkpoints.
      eval_records: fresh records of an evaluation.
      bin_tokens: about the most tokens of one device call's bin.
    """

    num_steps: int = 60
    num_prompts: int = 64
    group_size: int = 8
    mini_batch_size: int = 64
    learning_rate: float = 1e-3
    train_records: int = 4096
    eval_every: int = 30
    eval_records: int = 1024
    bin_tokens: int = 1024

    def step(self, arm: Arm) -> StepConfig:
        """Returns the settings of an arm's steps."""
        return StepConfig(
            method=arm.method,
            credit=CreditConfig.create(mode=arm.mode),
            sampling=SamplingConfig(self.group_size, MAX_TOKENS),
            objective=ObjectiveConfig(kl_weight=arm.kl, compute_dtype="float32", remat="none"),
            optimizer=OptimizerConfig(learning_rate=self.learning_rate),
            mini_batch_size=self.mini_batch_size,
            scoring=ScoringConfig(dtype="float32"),
            bin_tokens=self.bin_tokens)


def run_arm(run_dir: pathlib.Path, arm: Arm, training: Training, start: Policy, seed: int,
            report: Callable[[str], None]) -> TrainState:
    """Trains an arm from a seed's cold start, or goes on where it was stopped.

    Every arm of a seed meets the same records in the same order and draws with the same key.
    """
    with BackgroundLoop("exact judge") as background:
        return train(
            LoopConfig(RunConfig(run_dir, training.num_steps, training.eval_every, seed),
                       training.num_prompts, training.eval_every),
            training.step(arm), start, _prompts(start, training.train_records, [seed, _TRAINING],
                                           "t"),
            _evaluation_prompts(start, training, seed), ExactJudge(),
            background, report)


def measure_start(start: Policy, training: Training, seed: int) -> dict[str, float]:
    """Returns the six metrics of a cold start on the records that its arms are evaluated on."""
    prompts = _evaluation_prompts(start, training, seed)
    rollouts = roll_out(start, prompts, SamplingConfig(1, MAX_TOKENS), jax.random.key(seed), None)
    ideal = [[atom.ideal for atom in record.atoms] for record in rollouts.records]
    actual = [use_levels([value_of(atom) for atom in record.atoms], row[0])
              for record, row in zip(rollouts.records, rollouts.texts)]
    mask = np.arange(max(map(len, ideal))) < np.array([len(levels) for levels in ideal])[:, None]
    padded = np.zeros((2, *mask.shape), int)
    padded[0][mask], padded[1][mask] = sum(ideal, []), sum(actual, [])
    return calibration_metrics(*padded, mask)


def _evaluation_prompts(start: Policy, training: Training, seed: int) -> list[Prompt]:
    return _prompts(start, training.eval_records, [seed, _EVALUATION], "e")


def _prompts(start: Policy, count: int, seed, name: str) -> list[Prompt]:
    prompts, _ = render_prompts(
        start.tokenizer, draw_records(count, seed=seed, name=name), representation="atomic",
        max_prompt_tokens=start.config.max_positions - MAX_TOKENS)
    return prompts


def metrics_of(run_dir: pathlib.Path) -> list[dict]:
    """Returns the metrics of a run's steps, in order."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
