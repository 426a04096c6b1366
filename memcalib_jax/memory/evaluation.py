"""How well memories serve their questions: by category, stage and session (Memory-R2, 4 and E)."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from memcalib_jax.memory.agents import Agent
from memcalib_jax.memory.answer import answer_questions
from memcalib_jax.memory.bank import Bank, Entry, Insert
from memcalib_jax.memory.conversations import CATEGORIES, Conversation, Question
from memcalib_jax.memory.episodes import Trajectory
from memcalib_jax.memory.retrieval import Retriever
from memcalib_jax.memory.rewards import EvidenceCounts, bleu_1, evidence_counts, token_f1

STAGES = (8, 16, 32)
"""Numbers of sessions after which a question can be answered, by its latest evidence."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """An answered question of an evaluation.

    Attributes:
      conversation, question: which.
      answer: "" where the reply holds none.
      tagged: whether it stood in its tag.
      failed: whether there was no reply; its scores are 0 then, and it is left out of all means.
      f1, bleu_1: in [0, 1].
      evidence: in the bank, and in what was retrieved.
      right: the judge's verdict; None where there is none.
    """

    conversation: str
    question: Question
    answer: str
    tagged: bool
    failed: bool
    f1: float
    bleu_1: float
    evidence: EvidenceCounts
    right: bool | None = None

    def to_json(self) -> dict:
        """Returns the row as JSON values."""
        return {"conversation": self.conversation, "question": self.question.text,
                "category": category_of(self.question), "gold": self.question.answer,
                "answer": self.answer, "tagged": self.tagged, "failed": self.failed,
                "f1": self.f1, "bleu_1": self.bleu_1, "right": self.right,
                "evidence": list(self.question.evidence),
                "missing": self.evidence.missing, "unretrieved": self.evidence.unretrieved}


def category_of(question: Question) -> str:
    """Returns a category's name, of LoCoMo or of another benchmark."""
    return CATEGORIES.get(question.category, str(question.category))


def stage_of(question: Question) -> str:
    """Returns the first of `STAGES` in which a question can be answered."""
    for stage in STAGES:
        if question.last_session <= stage:
            return f"1-{stage}"
    return f"over {STAGES[-1]}"


def raw_bank(conversation: Conversation) -> Bank:
    """Returns a bank of all turns as they were said: what is retrieved from without a memory."""
    bank = Bank(conversation.speakers, seed=conversation.id)
    for session in conversation.sessions:
        bank, _ = bank.apply(
            [Insert(turn.speaker, f"{turn.speaker}: {turn.shown}", turn.dia_id)
             for turn in session.turns], session=session.number, time=session.time)
    return bank


class Everything:
    """A retriever that gives an answer agent the whole bank, in its own order."""

    def for_questions(self, bank: Bank, questions: Sequence[str]) -> list[dict[str, list[Entry]]]:
        """Returns all entries in one block, for each question."""
        return [{" and ".join(bank.speakers): list(bank.entries.values())} for _ in questions]


def score_answers(conversations: Sequence[Conversation], banks: Sequence[Bank], agent: Agent,
                  retriever: Retriever | Everything, prompts: Mapping[str, str], *,
                  overlap: str = "multiset") -> list[Scored]:
    """Asks each bank all questions of its conversation that are scored."""
    questions = [[question for question in conversation.questions if question.scored]
                 for conversation in conversations]
    answers = answer_questions(
        [(conversation.id, bank, asked)
         for conversation, bank, asked in zip(conversations, banks, questions)],
        agent, retriever, prompts)
    return [
        Scored(conversation.id, question, answer.text, answer.tagged, answer.failed,
               0.0 if answer.failed else token_f1(answer.text, question.answer, overlap=overlap),
               0.0 if answer.failed else bleu_1(answer.text, question.answer),
               evidence_counts(question, bank.dia_ids, answer.dia_ids))
        for conversation, bank, asked, said in zip(conversations, banks, questions, answers)
        for question, answer in zip(asked, said)]


def summarize(rows: Sequence[Scored]) -> dict:
    """Returns the metrics of all rows, and of each category, stage and latest session.

    Every group has `questions`, `failed` ones among them, and, over those that did not fail, F1
    and BLEU-1 in percent. M-Fail and retrieval failure, in percent of the pieces of evidence, are
    over all rows; `judge`, the percentage judged right, is over those with a verdict.
    """
    return {"all": _metrics(rows),
            "category": _grouped(rows, category_of),
            "stage": _grouped(rows, stage_of),
            "session": _grouped(rows, lambda question: str(question.last_session))}


def _grouped(rows, key: Callable[[Question], str]) -> dict[str, dict]:
    groups = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.question.last_session):
        groups[key(row.question)].append(row)
    return {name: _metrics(members) for name, members in groups.items()}


def _metrics(rows: Sequence[Scored]) -> dict:
    given = [row for row in rows if not row.failed]
    evidence = sum((row.evidence for row in rows), EvidenceCounts())
    return {"questions": len(rows), "failed": len(rows) - len(given),
            "f1": _percent([row.f1 for row in given]),
            "bleu_1": _percent([row.bleu_1 for row in given]),
            "judge": _percent([row.right for row in given if row.right is not None]),
            "m_fail": 100 * evidence.memory_failure if evidence.required else None,
            "retrieval_failure": 100 * evidence.retrieval_failure if evidence.required else None}


def _percent(values) -> float | None:
    return 100 * float(np.mean(values)) if values else None


def bank_growth(trajectories: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
    """Returns the mean numbers of entries and words of the banks after each session."""
    by_session = defaultdict(list)
    for trajectory in trajectories:
        for run in trajectory.runs:
            by_session[run.start.session.number].append(run.bank)
    return {str(number): {"entries": float(np.mean([len(bank) for bank in banks])),
                          "words": float(np.mean([bank.num_words for bank in banks]))}
            for number, banks in sorted(by_session.items())}


def completion_tokens(trajectories: Sequence[Trajectory]) -> dict[str, float] | None:
    """Returns the sampled tokens of a conversation, and the tails of single replies' lengths.

    None where an endpoint spoke, which gives texts alone.
    """
    lengths = [[end - start for run in trajectory.runs for chat in run.chats.values()
                for start, end in chat.steps] for trajectory in trajectories]
    replies = [length for of_conversation in lengths for length in of_conversation]
    if not replies:
        return None
    tails = np.percentile(replies, [50, 90, 99])
    return {"per_conversation": float(np.mean([sum(row) for row in lengths])),
            "per_reply": float(np.mean(replies)), "p50": float(tails[0]), "p90": float(tails[1]),
            "p99": float(tails[2]), "longest": float(max(replies))}
