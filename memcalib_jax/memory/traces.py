"""Questions as an answer agent meets them, to train it on (Memory-R2, A.1)."""

import dataclasses
import random
from collections.abc import Mapping, Sequence

from memcalib_jax.memory.agents import Chat
from memcalib_jax.memory.bank import Bank
from memcalib_jax.memory.conversations import Conversation
from memcalib_jax.memory.evaluation import Scored
from memcalib_jax.memory.retrieval import Retriever
from memcalib_jax.memory.roles import answer_text


@dataclasses.dataclass(frozen=True)
class Trace:
    """A question with the memories that were found for it.

    Attributes:
      conversation: its id.
      question: the question's place in the conversation's file.
      text: what the agent reads.
      gold: the answer.
      f1: what the agent that made the trace had; None where none has answered.
    """

    conversation: str
    question: int
    text: str
    gold: str
    f1: float | None = None

    def opening(self, prompts: Mapping[str, str]) -> Chat:
        """Returns the chat that the text goes on."""
        return Chat.opening(prompts["answer"])


def make_traces(conversations: Sequence[Conversation], banks: Sequence[Bank],
                retriever: Retriever, rows: Sequence[Scored] = ()) -> list[Trace]:
    """Makes a trace of every question that is scored; `rows` say how it was answered."""
    f1s = {(row.conversation, row.question.index): row.f1 for row in rows if not row.failed}
    traces = []
    for conversation, bank in zip(conversations, banks, strict=True):
        questions = [question for question in conversation.questions if question.scored]
        found = retriever.for_questions(bank, [question.text for question in questions])
        traces += [Trace(conversation.id, question.index, answer_text(question.text, memories),
                         question.answer, f1s.get((conversation.id, question.index)))
                   for question, memories in zip(questions, found)]
    return traces


def keep_traces(traces: Sequence[Trace], least_f1: float = 0.25) -> list[Trace]:
    """Returns those that an agent answered with at least this F1: others may have no answer."""
    return [trace for trace in traces if trace.f1 is not None and trace.f1 >= least_f1]


def split_traces(traces: Sequence[Trace], seed: int, *,
                 held_out: float = 0.1) -> tuple[list[Trace], list[Trace]]:
    """Splits at random into those to train on and the share held out, at least one of each.

    Raises:
      ValueError: there are fewer than two.
    """
    if len(traces) < 2:
        raise ValueError(f"{len(traces)} traces cannot be split: two are the fewest")
    count = min(max(1, round(held_out * len(traces))), len(traces) - 1)
    chosen = set(random.Random(seed).sample(range(len(traces)), count))
    return ([trace for place, trace in enumerate(traces) if place not in chosen],
            [trace for place, trace in enumerate(traces) if place in chosen])


def trace_from_json(row: dict) -> Trace:
    """Reads what `dataclasses.asdict` makes of a trace.

    Raises:
      ValueError: a field is missing or of another type.
    """
    kinds = {"conversation": str, "question": int, "text": str, "gold": str,
             "f1": int | float | None}
    for name, kind in kinds.items():
        if name not in row or isinstance(row[name], bool) or not isinstance(row[name], kind):
            raise ValueError(f"{name} is missing or of another type")
    return Trace(*(row[name] for name in kinds))
