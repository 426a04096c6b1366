"""Trains an answer agent by GRPO on questions with the memories found for them (Memory-R2, A.1)."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from memcalib_jax.credit import logo_advantages
from memcalib_jax.data import prompt_batches
from memcalib_jax.memory.agents import Ask, Identity, LocalAgent
from memcalib_jax.memory.rewards import bleu_1, token_f1
from memcalib_jax.memory.roles import parse_answer
from memcalib_jax.memory.traces import Trace
from memcalib_jax.models import ModelConfig
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.training.logo import LogoConfig, logo_update
from memcalib_jax.training.runner import RunConfig, Stepped, run_steps
from memcalib_jax.training.state import OptimizerConfig, TrainState, matrices_in
from memcalib_jax.training.step import NoValidResponse


@dataclasses.dataclass(frozen=True)
class AnsweringConfig:
    """What a step does.

    Attributes:
      objective, optimizer: constants of the update; the paper's has the level "token".
      num_prompts, group_size: questions of a step, and answers to each.
      num_mini_batches: how a step's answers are split.
      max_prompt_tokens, max_response_tokens: longer questions are left out of a step.
      overlap: how repeated tokens count in F1.
      bin_tokens: about the most tokens of one device call's bin.
      eval_every: steps between evaluations; the last step has one.
    """

    objective: LogoConfig
    optimizer: OptimizerConfig
    num_prompts: int = 64
    group_size: int = 8
    num_mini_batches: int = 4
    max_prompt_tokens: int = 12_288
    max_response_tokens: int = 1024
    overlap: str = "multiset"
    bin_tokens: int = 8192
    eval_every: int = 5


def train_answering(run: RunConfig, start: dict, config: ModelConfig, tokenizer,
                    traces: Sequence[Trace], held_out: Sequence[Trace],
                    prompts: Mapping[str, str], settings: AnsweringConfig,
                    report: Callable[[str], None] = functools.partial(print, flush=True)
                    ) -> TrainState:
    """Trains from the newest checkpoint, or from `start`, to `run.num_steps`.

    Args:
      run: how far.
      start: float32 parameters; stay as the reference.
      config, tokenizer: of the model.
      traces: at least `settings.num_prompts`.
      held_out: answered greedily before, during and after training; metrics under `eval/`.
      prompts: "answer" is the instructions.
      settings: what to do.
      report: takes one line of progress at a time.

    Raises:
      NoValidResponse: every question of a step is too long.
    """
    reference = matrices_in(start, settings.objective.compute_dtype)
    stream = prompt_batches(traces, num_prompts=settings.num_prompts, seed=run.seed)

    def agent_of(params, key, temperature):
        return LocalAgent(params, config, tokenizer, key=key, temperature=temperature,
                          max_tokens=settings.max_response_tokens,
                          max_prompt_tokens=settings.max_prompt_tokens)

    def evaluate(state):
        if not held_out:
            return {}
        agent = agent_of(matrices_in(state.params, settings.objective.compute_dtype),
                         jax.random.key(run.seed), 0.0)
        spoken = agent.reply(_asks(held_out, prompts, 1))
        answers = [parse_answer(one.text) for one in spoken]
        return {"eval/f1": float(np.mean([token_f1(text, trace.gold, overlap=settings.overlap)
                                          for (text, _), trace in zip(answers, held_out)])),
                "eval/bleu": float(np.mean([bleu_1(text, trace.gold)
                                            for (text, _), trace in zip(answers, held_out)])),
                "eval/tagged": float(np.mean([tagged for _, tagged in answers]))}

    def one_step(state, step):
        policy = matrices_in(state.params, settings.objective.compute_dtype)
        agent = agent_of(policy, jax.random.fold_in(jax.random.key(run.seed), step),
                         settings.objective.temperature)
        asked = [trace for trace in next(stream) for _ in range(settings.group_size)]
        spoken = agent.reply(_asks(asked[::settings.group_size], prompts, settings.group_size))
        groups = np.arange(len(asked)) // settings.group_size
        valid = np.array([bool(one.chat.steps) for one in spoken])
        if not valid.any():
            raise NoValidResponse(
                "every question of this step exceeds --max_prompt_tokens="
                f"{settings.max_prompt_tokens}; nothing was updated. Raise it, or retrieve less")
        answers = [parse_answer(one.text) for one in spoken]
        rewards = np.array([token_f1(text, trace.gold, overlap=settings.overlap)
                            for (text, _), trace in zip(answers, asked)])
        advantages = np.asarray(logo_advantages(rewards, groups, valid,
                                                num_groups=settings.num_prompts))
        state, values = logo_update(
            state, config, [one.chat for one, kept in zip(spoken, valid) if kept],
            advantages[valid], policy, reference, settings.objective, settings.optimizer,
            bin_sizes(settings.bin_tokens), num_epochs=1,
            num_mini_batches=settings.num_mini_batches, seed=step)
        state = state.replace(step=state.step + 1)
        lengths = [end - start for one in spoken for start, end in one.chat.steps]
        values |= {
            "rollout/f1": float(rewards[valid].mean()),
            "rollout/tagged": float(np.mean([tagged for _, tagged in answers])),
            "rollout/length_mean": float(np.mean(lengths)),
            "rollout/cut": float(np.mean([one.end == "length" for one in spoken])),
            "rollout/too_long": float(np.mean(~valid)),
            "credit/nonzero": float(np.mean(advantages[valid] != 0))}
        if step == run.num_steps or step % settings.eval_every == 0:
            values |= evaluate(state)
        rows = [{"conversation": trace.conversation, "question": trace.question, "end": one.end,
                 "text": one.text, "answer": text, "gold": trace.gold, "f1": float(reward),
                 "advantage": float(advantage)}
                for trace, one, (text, _), reward, advantage in zip(
                    asked, spoken, answers, rewards, advantages)]
        return Stepped(state, values, rows)

    return run_steps(run, start, settings.optimizer, {"traces": stream}, one_step, _describe,
                     report, before=evaluate if held_out else None)


def _asks(traces: Sequence[Trace], prompts: Mapping[str, str], count: int) -> list[Ask]:
    """Returns `count` asks of each trace, in a row."""
    return [Ask(Identity(trace.conversation, member, 0, trace.question, "answer"),
                trace.opening(prompts), trace.text)
            for trace in traces for member in range(count)]


def _describe(values: dict[str, float]) -> str:
    parts = [f"{name} {values[key]:.3f}" for name, key in (
        ("F1", "rollout/f1"), ("tagged", "rollout/tagged"), ("loss", "loss/total"),
        ("held-out F1", "eval/f1")) if key in values]
    return "  ".join(parts)
