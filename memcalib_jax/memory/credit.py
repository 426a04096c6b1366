"""From banks to the reward and the group of every chat: global and local, Memory-R2, 3.3."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from memcalib_jax.credit import logo_advantages
from memcalib_jax.memory.agents import Agent, Chat
from memcalib_jax.memory.answer import Answer, answer_questions
from memcalib_jax.memory.conversations import Question
from memcalib_jax.memory.episodes import SessionRun, Trajectory
from memcalib_jax.memory.retrieval import Retriever
from memcalib_jax.memory.rewards import (
    EvidenceCounts, RewardConfig, bank_reward, bleu_1, choose_questions, evidence_counts,
    excess_ratio, session_rewards, token_f1)


@dataclasses.dataclass(frozen=True)
class Row:
    """A chat with what it earned.

    Attributes:
      chat: of one role in one session; all its steps share the reward.
      group: whom it is compared with, see `Identity.group`.
      reward: NaN where it is not valid.
      valid: False where an answer that the reward needs could not be had.
    """

    chat: Chat
    group: tuple
    reward: float
    valid: bool


@dataclasses.dataclass(frozen=True)
class BankScore:
    """How well a bank's questions were answered.

    Attributes:
      f1s: by question; None where an answer failed, since no reward follows from the others.
      bleu: mean BLEU-1 of the answers there are.
      untagged: answers without their tag.
      evidence: counts over the questions.
      excess: words beyond the allowance, as a share of the conversation's.
    """

    f1s: dict[Question, float] | None
    bleu: float
    untagged: int
    evidence: EvidenceCounts
    excess: float

    @property
    def f1(self) -> float:
        """The mean F1; NaN where an answer failed or nothing was asked."""
        return _mean(self.f1s.values()) if self.f1s else float("nan")


def score_bank(run: SessionRun, questions: Sequence[Question], answers: Sequence[Answer],
               config: RewardConfig) -> BankScore:
    """Scores the answers from the bank after a session; the conversation counts up to there."""
    f1s = {question: token_f1(answer.text, question.answer, overlap=config.overlap)
           for question, answer in zip(questions, answers)}
    given = [(question, answer) for question, answer in zip(questions, answers)
             if not answer.failed]
    words = run.start.conversation.words_until(run.start.session.number)
    return BankScore(
        f1s if len(given) == len(questions) else None,
        _mean(bleu_1(a.text, q.answer) for q, a in given),
        sum(not answer.tagged for _, answer in given),
        sum((evidence_counts(q, run.bank.dia_ids, a.dia_ids) for q, a in given),
            EvidenceCounts()),
        excess_ratio(run.bank.num_words, words, allowance=config.allowance))


def score_runs(runs: Sequence[SessionRun], questions: Sequence[Sequence[Question]], agent: Agent,
               retriever: Retriever, prompts: Mapping[str, str],
               config: RewardConfig) -> list[BankScore]:
    """Asks about the bank after each session, all side by side, and scores the answers."""
    answers = answer_questions(
        [(run.start.conversation.id, run.bank, asked) for run, asked in zip(runs, questions)],
        agent, retriever, prompts)
    return [score_bank(run, asked, said, config)
            for run, asked, said in zip(runs, questions, answers)]


def reward_rows(episodes: Sequence[Sequence[Trajectory]], rerolled: Sequence[SessionRun],
                agent: Agent, retriever: Retriever, prompts: Mapping[str, str],
                config: RewardConfig, *seed: str | int, session_only: bool = False,
                roles: Sequence[str] | None = None) -> tuple[list[Row], dict[str, float]]:
    """Rewards every chat of the trajectories and of the rerolled sessions.

    All members of a group answer the same questions, drawn from the seed: of a terminal bank
    those about the whole conversation, of a rerolled bank those up to its session.

    Args:
      episodes: `[conversations][trajectories]`.
      rerolled: sessions rerolled from their banks.
      agent, retriever, prompts: how questions are answered.
      config: constants.
      seed: of this step.
      session_only: ask a rerolled bank only about what its session added.
      roles: those that are trained; None: all.

    Returns:
      One row a chat that has steps, and the step's metrics.
    """
    ends = [trajectory.runs[-1] for row in episodes for trajectory in row]
    runs = [*ends, *rerolled]
    questions = [choose_questions(
        run.start.conversation.questions_until(
            run.start.session.number, only=session_only and run.start.anchor is not None),
        config.terminal_questions if run.start.anchor is None else config.local_questions,
        *seed, run.start.conversation.id, run.start.session.number, run.start.anchor is None)
        for run in runs]
    scores = score_runs(runs, questions, agent, retriever, prompts, config)
    rows = []
    trajectories = [trajectory for row in episodes for trajectory in row]
    for trajectory, score in zip(trajectories, scores):
        sessions = [run.start.session.number for run in trajectory.runs]
        unfinished = {run.start.session.number for run in trajectory.runs if not run.finished}
        rewards = None if score.f1s is None else session_rewards(
            score.f1s, sessions, score.excess, config, unfinished=unfinished)
        for run in trajectory.runs:
            rows += _rows(run, rewards and rewards[run.start.session.number], roles)
    for run, score in zip(rerolled, scores[len(ends):]):
        reward = None if score.f1s is None else bank_reward(
            list(score.f1s.values()), score.excess, config) if run.finished else 0.0
        rows += _rows(run, reward, roles)
    return rows, _metrics(trajectories, rerolled, scores, rows)


def row_advantages(rows: Sequence[Row]) -> np.ndarray:
    """Returns each row's advantage within its group, float32 [rows]."""
    if not rows:
        return np.zeros(0, np.float32)
    names = {group: number for number, group in enumerate(dict.fromkeys(r.group for r in rows))}
    return np.asarray(logo_advantages(
        np.array([row.reward for row in rows]), np.array([names[row.group] for row in rows]),
        np.array([row.valid for row in rows]), num_groups=len(names)))


def bank_metrics(scores: Sequence[BankScore], banks: Sequence) -> dict[str, float]:
    """Returns the means of terminal banks under `memory/` names; F1 over banks without failure."""
    evidence = sum((score.evidence for score in scores), EvidenceCounts())
    return {
        "memory/f1": _mean(score.f1 for score in scores),
        "memory/bleu": _mean(score.bleu for score in scores),
        "memory/failure": evidence.memory_failure,
        "memory/retrieval_failure": evidence.retrieval_failure,
        "memory/excess": _mean(score.excess for score in scores),
        "memory/entries": _mean(len(bank) for bank in banks),
        "memory/words": _mean(bank.num_words for bank in banks),
        "memory/untagged": float(sum(score.untagged for score in scores)),
        "memory/failed": float(sum(score.f1s is None for score in scores)),
    }


def _mean(values: Iterable[float]) -> float:
    """Returns the mean of those that are numbers; NaN where none is."""
    values = [value for value in values if value == value]
    return float(np.mean(values)) if values else float("nan")


def _rows(run, reward, roles):
    return [Row(chat, run.start.identity(role).group, float("nan") if reward is None else reward,
                reward is not None)
            for role, chat in run.chats.items() if chat.steps and (roles is None or role in roles)]


def _metrics(trajectories, rerolled, scores, rows):
    counts = Counter()
    for run in [*(run for t in trajectories for run in t.runs), *rerolled]:
        counts.update({"unread": sum(n for name, n in run.counts.items() if name[:7] == "unread/")})
        counts.update({name: n for name, n in run.counts.items() if name[:7] != "unread/"})
    ends = scores[:len(trajectories)]
    return bank_metrics(ends, [t.bank for t in trajectories]) | {
        "memory/reward": _mean(row.reward for row in rows),
        "memory/rerolled": float(len(rerolled)),
    } | {f"memory/{name}": float(count) for name, count in sorted(counts.items())}
