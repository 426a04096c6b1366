"""A model that says what a test tells it to, behind the client's own protocol."""

import asyncio
import json

import pytest

from memcalib_jax import construction
from memcalib_jax.api import ChatError
from memcalib_jax.api.client import Reply
from memcalib_jax.construction.decisions import PROMPT_NAMES, Asker
from memcalib_jax.construction.stand_in import answer
from memcalib_jax.prompt_files import load_prompts


class ScriptedModel:
    """Gives each task its reply in `replies`, or the stand-in's; checks it as a client does.

    A reply is an object, a text, a function of the stand-in's reply, or a list of these, one for
    each attempt of three.
    """

    def __init__(self, replies):
        self.replies = replies
        self.asked = []

    async def complete(self, messages, *, sample_index=0, check=None, schema=None):
        await asyncio.sleep(0)
        payload = json.loads(messages[-1]["content"])
        self.asked.append((payload["task"], payload))
        replies = self.replies.get(payload["task"], lambda reply: reply)
        error = None
        for reply in (replies if isinstance(replies, list) else [replies] * 3):
            text = self._text(reply, messages)
            try:
                return Reply(text, check(text))
            except ValueError as caught:
                error = caught
        raise ChatError("parse", f"bad reply: {error}")

    @staticmethod
    def _text(reply, messages):
        if callable(reply):
            reply = reply(json.loads(answer({"messages": messages})))
        return reply if isinstance(reply, str) else json.dumps(reply)


@pytest.fixture
def asker():
    def make(**replies):
        return Asker(ScriptedModel(replies), load_prompts(construction.__name__, PROMPT_NAMES))

    return make
