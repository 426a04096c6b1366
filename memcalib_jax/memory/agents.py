"""Who speaks for a role: a model of ours, tokens in and tokens out, or any chat endpoint."""

import asyncio
import dataclasses
import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Protocol

import jax

from memcalib_jax.api import BackgroundLoop, ChatClient, ChatError
from memcalib_jax.data import render
from memcalib_jax.models import ModelConfig
from memcalib_jax.sampling import sample

ENDS = ("stop", "length", "too_long", "failed")
"""How a reply ended: of itself, cut at its limit, not made since its prompt was too long for the
model's limits, or not made since the endpoint failed. After the last three a chat is over."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which generation this is; its group follows from it alone.

    Attributes:
      conversation: its id.
      trajectory: number of the trajectory, or of the reroll.
      session, chunk: where in the conversation, by number and from 0.
      role: "extract", "manage" or "merged"; "answer".
      anchor: the trajectory whose bank a reroll starts from; None in the trajectories themselves.
    """

    conversation: str
    trajectory: int
    session: int
    chunk: int
    role: str
    anchor: int | None = None

    @property
    def group(self) -> tuple:
        """Names those that its reward is compared with: all but the member and the chunk."""
        return self.conversation, self.session, self.role, self.anchor

    @property
    def request_id(self) -> int:
        """Seeds its random numbers, in [0, 2^32), the same in every process and run."""
        text = "/".join(map(str, dataclasses.astuple(self)))
        return int.from_bytes(hashlib.blake2s(text.encode(), digest_size=4).digest(), "little")


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat of one role in one session; every turn makes a new value.

    Attributes:
      messages: all of it, as texts.
      tokens: all of it, as the model saw and sampled it; empty with an endpoint.
      steps: where each reply lies in `tokens`, as (start, end).
      log_probs: the sampler's, nats, one list a step.
    """

    messages: tuple[dict, ...]
    tokens: tuple[int, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()
    log_probs: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def opening(cls, instructions: str) -> "Chat":
        """Returns a chat in which nothing has been said."""
        return cls(({"role": "system", "content": instructions},))

    def asked(self, text: str) -> tuple[dict, ...]:
        """Returns the messages with a user's more."""
        return *self.messages, {"role": "user", "content": text}

    def answered(self, text: str, reply: str) -> tuple[dict, ...]:
        """Returns the messages with a user's and a reply more."""
        return *self.asked(text), {"role": "assistant", "content": reply}


@dataclasses.dataclass(frozen=True)
class Ask:
    """The next user message of a chat, and which generation answers it."""

    identity: Identity
    chat: Chat
    text: str


@dataclasses.dataclass(frozen=True)
class Spoken:
    """A chat after a reply, its text, and how it ended (one of `ENDS`).

    A reply that was not made leaves the chat as it was and the text empty.
    """

    chat: Chat
    text: str
    end: str


class Agent(Protocol):
    """Answers many chats at once, in the order given."""

    def reply(self, asks: Sequence[Ask]) -> list[Spoken]: ...


class LocalAgent:
    """A model of ours. Chats grow by the sampled tokens themselves: nothing is encoded again.

    Chats with equal prompts are prefilled once; each still draws its own random numbers.

    Attributes:
      counts: "prompt_tokens" that were asked for, "prefilled_tokens" of them that were computed,
        "reply_tokens" that were sampled.
    """

    def __init__(self, params: dict, config: ModelConfig, tokenizer, *, key: jax.Array,
                 max_tokens: int, max_prompt_tokens: int, temperature: float = 1.0):
        self._params, self._config, self._tokenizer = params, config, tokenizer
        self._key, self._temperature = key, temperature
        self._max_tokens, self._max_prompt = max_tokens, max_prompt_tokens
        self.counts: Counter[str] = Counter()

    def reply(self, asks: Sequence[Ask]) -> list[Spoken]:
        """Returns one reply to each."""
        prompts = [self._prompt(ask) for ask in asks]
        spoken = [Spoken(ask.chat, "", "too_long") for ask in asks]
        members = defaultdict(list)
        for place, prompt in enumerate(prompts):
            if len(prompt) <= self._max_prompt:
                members[prompt].append(place)
        by_count = defaultdict(list)
        for prompt, places in members.items():
            by_count[len(places)].append((prompt, places))
        for count, chosen in sorted(by_count.items()):
            samples = sample(
                self._params, self._config, [prompt for prompt, _ in chosen], num_samples=count,
                max_tokens=self._max_tokens, key=self._key, temperature=self._temperature,
                stop_ids=self._config.eos_ids,
                request_ids=[asks[places[0]].identity.request_id for _, places in chosen])
            for (prompt, places), row in zip(chosen, samples):
                self.counts.update(prompt_tokens=count * len(prompt), prefilled_tokens=len(prompt),
                                   reply_tokens=sum(len(one.tokens) for one in row))
                for place, one in zip(places, row):
                    spoken[place] = self._spoken(asks[place], prompt, one)
        return spoken

    def _prompt(self, ask):
        if not ask.chat.tokens:
            return tuple(render(self._tokenizer, list(ask.chat.asked(ask.text))))
        return ask.chat.tokens + tuple(
            later_turn(self._tokenizer, ask.text, self._config.eos_ids))

    def _spoken(self, ask, prompt, one):
        kept = one.tokens[:-1] if one.finish_reason == "stop" else one.tokens
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        chat = Chat(ask.chat.answered(ask.text, text), prompt + tuple(one.tokens),
                    (*ask.chat.steps, (len(prompt), len(prompt) + len(one.tokens))),
                    (*ask.chat.log_probs, tuple(one.log_probs)))
        return Spoken(chat, text, one.finish_reason)


def later_turn(tokenizer, text: str, eos_ids: Sequence[int]) -> list[int]:
    """Returns the tokens between a reply's stop token and the next reply: the user's turn.

    They are cut out of a whole chat as the template renders it.
    """
    mark = "REPLYGOESHERE"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark},
                {"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    tokens = tokenizer.encode(rendered.split(mark, 1)[1], add_special_tokens=False)
    # The reply brings its own stop token along.
    return tokens[1:] if tokens and tokens[0] in eos_ids else tokens


class EndpointAgent:
    """Any chat endpoint. What fails ends its chat, and is counted as that.

    `schemas` holds the reply's form by role, for endpoints that know of such.
    """

    def __init__(self, client: ChatClient, loop: BackgroundLoop, schemas: dict | None = None):
        self._client, self._loop, self._schemas = client, loop, schemas or {}

    def reply(self, asks: Sequence[Ask]) -> list[Spoken]:
        """Returns one reply to each, all asked for at once within the client's limits."""
        return self._loop.submit(self._all(asks)).result()

    async def _all(self, asks):
        return await asyncio.gather(*map(self._one, asks))

    async def _one(self, ask):
        try:
            reply = await self._client.complete(
                ask.chat.asked(ask.text), sample_index=ask.identity.request_id, allow_empty=True,
                schema=self._schemas.get(ask.identity.role))
        except ChatError:
            return Spoken(ask.chat, "", "failed")
        chat = dataclasses.replace(ask.chat, messages=ask.chat.answered(ask.text, reply.text))
        return Spoken(chat, reply.text, "length" if reply.finish_reason == "length" else "stop")
