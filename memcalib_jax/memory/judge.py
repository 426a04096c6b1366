"""A lenient judge of answers: right or wrong, by a chat endpoint (Memory-R2, C.1)."""

import asyncio
import json
from collections.abc import Sequence

from memcalib_jax.api import BackgroundLoop, ChatClient, ChatError
from memcalib_jax.api.replies import read_object
from memcalib_jax.memory.conversations import Question

SCHEMA = {"type": "object", "required": ["label"], "additionalProperties": False,
          "properties": {"label": {"type": "string", "enum": ["CORRECT", "WRONG"]}}}


def judge_answers(pairs: Sequence[tuple[Question, str]], client: ChatClient, loop: BackgroundLoop,
                  instructions: str) -> list[bool | None]:
    """Says of each answer whether it is right; None where no verdict was to be had.

    A reply that is no verdict is asked for again, as often as the client's settings allow.

    Args:
      pairs: questions, and the answers to them.
      client: the judge, best at temperature 0.
      loop: what it runs on.
      instructions: the prompt "judge".
    """
    async def all_of_them():
        return await asyncio.gather(*(_judge(client, instructions, *pair) for pair in pairs))

    return loop.submit(all_of_them()).result()


async def _judge(client, instructions, question, answer):
    payload = {"question": question.text, "reference": question.answer, "answer": answer}
    messages = [{"role": "system", "content": instructions},
                {"role": "user", "content": json.dumps(payload, ensure_ascii=False)}]
    try:
        return (await client.complete(messages, check=read_label, schema=SCHEMA)).parsed
    except ChatError:
        return None


def read_label(reply: str) -> bool:
    """Returns whether the verdict of a reply is that the answer is right.

    Raises:
      ValueError: the reply holds no verdict.
    """
    label = read_object(reply).get("label")
    if not isinstance(label, str) or label.strip().upper() not in ("CORRECT", "WRONG"):
        raise ValueError('"label" must be CORRECT or WRONG')
    return label.strip().upper() == "CORRECT"
