"""Training a policy to build memory: a step, a validation, and a stage of the curriculum."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from memcalib_jax.memory.agents import Agent, LocalAgent
from memcalib_jax.memory.conversations import Conversation
from memcalib_jax.memory.credit import bank_metrics, reward_rows, row_advantages, score_runs
from memcalib_jax.memory.curriculum import Patience, Stage
from memcalib_jax.memory.episodes import (
    EpisodeConfig, Trajectory, choose_rerolls, run_sessions, run_trajectories)
from memcalib_jax.memory.retrieval import Retriever
from memcalib_jax.memory.rewards import RewardConfig
from memcalib_jax.models import ModelConfig
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.training.checkpoint import Checkpoints, newest_state
from memcalib_jax.training.logo import LogoConfig, logo_update
from memcalib_jax.training.preemption import Preempted
from memcalib_jax.training.runner import RunConfig, Stepped, run_steps
from memcalib_jax.training.state import OptimizerConfig, TrainState, matrices_in
from memcalib_jax.training.step import NoValidResponse


@dataclasses.dataclass(frozen=True)
class BuildingConfig:
    """What a step does.

    Attributes:
      episode, reward, objective, optimizer: constants of the parts.
      num_epochs, num_mini_batches: how a step's chats are used.
      max_prompt_tokens, max_response_tokens: of one generation; a chat's earlier turns belong to
        its prompt.
      local_temperature: of rerolls; 0: greedy, as the release has it.
      session_only: ask a rerolled bank only about what its session added.
      trained_roles: roles whose chats are learned from; None: all.
      bin_tokens: about the most tokens of one device call's bin.
      eval_every: steps between validations; the last step of a stage has one.
      patience: validations without gain that end a stage.
    """

    episode: EpisodeConfig
    reward: RewardConfig
    objective: LogoConfig
    optimizer: OptimizerConfig
    num_epochs: int = 2
    num_mini_batches: int = 4
    max_prompt_tokens: int = 8192
    max_response_tokens: int = 2048
    local_temperature: float = 1.0
    session_only: bool = False
    trained_roles: tuple[str, ...] | None = None
    bin_tokens: int = 8192
    eval_every: int = 5
    patience: int = 3


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What stays as it is while the policy learns.

    Attributes:
      config, tokenizer: of the policy.
      answerer: answers questions.
      retriever: finds memories.
      prompts: instructions by role.
    """

    config: ModelConfig
    tokenizer: object
    answerer: Agent
    retriever: Retriever
    prompts: Mapping[str, str]


def building_agent(params: dict, around: Surroundings, settings: BuildingConfig, key: jax.Array,
                   temperature: float) -> LocalAgent:
    """Returns the policy as an agent; `params` are in the dtype of the products."""
    return LocalAgent(
        params, around.config, around.tokenizer, key=key, temperature=temperature,
        max_tokens=settings.max_response_tokens, max_prompt_tokens=settings.max_prompt_tokens)


def building_step(state: TrainState, reference: dict, around: Surroundings,
                  conversations: Sequence[Conversation], settings: BuildingConfig,
                  *seed: int) -> Stepped:
    """Builds memories, rerolls sessions, answers questions, assigns credit and updates.

    Args:
      state: consumed.
      reference: the stage's start, in the dtype of the products.
      around: what stays as it is.
      conversations: to train on, cut to the stage's sessions.
      settings: what to do.
      seed: the step's own.

    Raises:
      NoValidResponse: no chat has a reward.
    """
    key = functools.reduce(jax.random.fold_in, seed, jax.random.key(0))
    policy = matrices_in(state.params, settings.objective.compute_dtype)
    roles, episode = settings.episode.roles, settings.episode
    agent = building_agent(policy, around, settings, key, settings.objective.temperature)
    episodes = run_trajectories(conversations, dict.fromkeys(roles, agent), around.retriever,
                                around.prompts, episode)
    local = building_agent(policy, around, settings, key, settings.local_temperature)
    rerolled = run_sessions(choose_rerolls(episodes, episode, *seed), dict.fromkeys(roles, local),
                            around.retriever, around.prompts, episode)
    rows, metrics = reward_rows(
        episodes, rerolled, around.answerer, around.retriever, around.prompts, settings.reward,
        *seed, session_only=settings.session_only, roles=settings.trained_roles)
    valid = [row.valid for row in rows]
    if not any(valid):
        raise NoValidResponse(
            f"none of {len(rows)} chats has a reward: replies could not be made or questions not "
            "be answered; nothing was updated. Check the answer endpoint and --max_prompt_tokens")
    advantages = row_advantages(rows)
    used = [(row.chat, advantage) for row, advantage in zip(rows, advantages) if row.valid]
    chats, advantages = zip(*used)
    state, losses = logo_update(
        state, around.config, chats, advantages, policy, reference, settings.objective,
        settings.optimizer, bin_sizes(settings.bin_tokens), num_epochs=settings.num_epochs,
        num_mini_batches=settings.num_mini_batches, seed=seed[-1])
    counts = agent.counts + local.counts
    metrics |= losses | {
        "memory/valid": float(np.mean(valid)),
        "credit/nonzero": float(np.mean(np.asarray(advantages) != 0)),
        "sampler/reply_tokens": float(counts["reply_tokens"]),
        "sampler/prefill_share": counts["prefilled_tokens"] / max(counts["prompt_tokens"], 1)}
    return Stepped(state.replace(step=state.step + 1), metrics,
                   [_shown(t, g) for row in episodes for g, t in enumerate(row)])


def validate(params: dict, around: Surroundings, conversations: Sequence[Conversation],
             settings: BuildingConfig) -> dict[str, float]:
    """Builds each conversation's memory greedily and asks all questions; metrics under `eval/`."""
    agent = building_agent(matrices_in(params, settings.objective.compute_dtype), around, settings,
                           jax.random.key(0), 0.0)
    once = dataclasses.replace(settings.episode, num_trajectories=1)
    episodes = run_trajectories(conversations, dict.fromkeys(once.roles, agent), around.retriever,
                                around.prompts, once)
    runs = [row[0].runs[-1] for row in episodes]
    questions = [run.start.conversation.questions_until(run.start.session.number) for run in runs]
    scores = score_runs(runs, questions, around.answerer, around.retriever, around.prompts,
                        settings.reward)
    metrics = bank_metrics(scores, [run.bank for run in runs])
    return {name.replace("memory/", "eval/"): value for name, value in metrics.items()}


class _EndOfStage:
    """Ends a stage early as the system would: what is done is saved first."""

    def __init__(self, stop, patience: Patience):
        self._stop, self._patience = stop, patience

    def agreed(self) -> bool:
        return self._patience.exhausted or self._stop.agreed()


def train_stage(run: RunConfig, stage: Stage, start: dict, around: Surroundings,
                conversations: Sequence[Conversation], validation: Sequence[Conversation],
                settings: BuildingConfig,
                report: Callable[[str], None] = functools.partial(print, flush=True)) -> dict:
    """Trains one stage from its newest checkpoint, or from `start`, and returns the best parameters.

    These are those of the best validation, or the last ones without any.

    Args:
      run: where and from which seed; its number of steps is that of the stage.
      stage: how many sessions.
      start: float32 parameters; stay as the reference.
      around: what stays as it is.
      conversations, validation: whole; training cuts the first to the stage's sessions.
      settings: what to do.
      report: takes one line of progress at a time.

    Raises:
      Preempted: told to stop; what has been done is saved.
    """
    reference = matrices_in(start, settings.objective.compute_dtype)
    cut = [conversation.first_sessions(stage.sessions) for conversation in conversations]
    patience = Patience(settings.patience)
    best = Checkpoints(run.run_dir / "best" / "checkpoints", keep=1)

    def one_step(state, step):
        stepped = building_step(state, reference, around, cut, settings, run.seed, stage.sessions,
                                step)
        if validation and (step == run.num_steps or step % settings.eval_every == 0):
            values = validate(stepped.state.params, around, validation, settings)
            if patience.gains(step, values["eval/f1"]):
                # One of steps that a killed run does again may be there.
                if best.latest() is not None and best.latest() >= step:
                    best.delete(best.latest())
                best.save_params(step, stepped.state.params, {"eval": values})
            stepped.metrics.update(values)
        return stepped

    wrapped = dataclasses.replace(run, stop=_EndOfStage(run.stop, patience))
    try:
        state = run_steps(wrapped, start, settings.optimizer, {"patience": patience}, one_step,
                          _describe, report)
    except Preempted:
        if not patience.exhausted or run.stop.agreed():
            raise
        report(f"{settings.patience} validations without gain: the stage ends")
        last = Checkpoints(run.run_dir / "checkpoints")
        state = newest_state(last, start, settings.optimizer, {})
        last.close()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=x.sharding),
                        start)
    params = (state.params if patience.best_step is None
              else best.restore_params(patience.best_step, like))
    best.close()
    return params


def _shown(trajectory: Trajectory, number: int) -> dict:
    """Returns a trajectory as JSON values: its replies, their ends, and the terminal bank."""
    return {
        "conversation": trajectory.conversation.id, "trajectory": number,
        "bank": trajectory.bank.to_json(),
        "sessions": [{
            "session": run.start.session.number, "finished": run.finished,
            "counts": dict(sorted(run.counts.items())),
            "replies": {role: [m["content"] for m in chat.messages if m["role"] == "assistant"]
                        for role, chat in run.chats.items()}} for run in trajectory.runs]}


def _describe(values: dict[str, float]) -> str:
    parts = [f"F1 {values['memory/f1']:.3f}", f"M-Fail {values['memory/failure']:.2f}",
             f"entries {values['memory/entries']:.1f}", f"loss {values['loss/total']:.4f}"]
    if "eval/f1" in values:
        parts.append(f"validation F1 {values['eval/f1']:.3f}")
    return "  ".join(parts)
