"""Answers from a bank, by an agent that stays as it is while the memory is trained."""

import dataclasses
from collections.abc import Mapping, Sequence

from memcalib_jax.memory.agents import Agent, Ask, Chat, Identity
from memcalib_jax.memory.bank import Bank
from memcalib_jax.memory.conversations import Question
from memcalib_jax.memory.retrieval import Retriever
from memcalib_jax.memory.roles import answer_text, parse_answer


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the agent said.

    Attributes:
      text: the answer; "" where the reply has none.
      tagged: whether it stood in its tag.
      dia_ids: the turns that the retrieved entries rest on.
      failed: whether there is no reply, so that the text says nothing about the bank.
    """

    text: str
    tagged: bool
    dia_ids: frozenset[str]
    failed: bool = False


def answer_questions(asked: Sequence[tuple[str, Bank, Sequence[Question]]], agent: Agent,
                     retriever: Retriever, prompts: Mapping[str, str]) -> list[list[Answer]]:
    """Answers each bank's questions, all side by side.

    Questions whose agent would read the same are asked once: banks of one group answer alike
    where they hold the same.

    Args:
      asked: conversation id, bank and questions.
      agent: best at temperature 0.
      retriever: finds what the agent reads.
      prompts: "answer" is its instructions.

    Returns:
      One list a bank, in order.
    """
    found = [retriever.for_questions(bank, [question.text for question in questions])
             for _, bank, questions in asked]
    texts = [[answer_text(question.text, memories) for question, memories in zip(questions, row)]
             for (_, _, questions), row in zip(asked, found)]
    asks = {}
    for (conversation, _, questions), row in zip(asked, texts):
        for question, text in zip(questions, row):
            identity = Identity(conversation, 0, 0, question.index, "answer")
            asks.setdefault(text, Ask(identity, Chat.opening(prompts["answer"]), text))
    replies = dict(zip(asks, agent.reply(list(asks.values()))) if asks else ())

    def answer(text, memories):
        spoken = replies[text]
        said, tagged = parse_answer(spoken.text)
        turns = (turn for entries in memories.values() for e in entries for turn in e.dia_ids)
        return Answer(said, tagged, frozenset(turns), spoken.end in ("too_long", "failed"))

    return [[answer(*pair) for pair in zip(*rows)] for rows in zip(texts, found)]
