"""What a stage may decide of a sample, and how it asks a model."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from memcalib_jax.api import ChatClient, ChatError
from memcalib_jax.api.replies import read_object

PROMPT_NAMES = ("screen", "derive", "derive_coding", "annotate", "distract", "rubric",
                "naturalize", "review", "respond", "verify")


class Rejected(Exception):
    """A sample ends here: `reason` is a name to count by, `detail` says more to a person."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class BadReply(ValueError):
    """A model's reply that does not do; it is asked again, and then the sample is rejected."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Model(Protocol):
    """Whoever answers: a chat client, or a test's stand-in."""

    async def complete(self, messages, *, sample_index=0, check=None, schema=None): ...


@dataclass
class Asker:
    """Asks one model for JSON objects, by the instructions of a task.

    Attributes:
      client: who answers.
      prompts: instructions by name, as `prompt_files.load_prompts` gives them.
      schemas: forms of the replies by the name of the prompt; none is sent where there is none.
    """

    client: ChatClient | Model
    prompts: Mapping[str, str]
    schemas: Mapping[str, Mapping] = field(default_factory=dict)

    async def __call__(self, task: str, payload: dict, check: Callable[[dict], Any], *,
                       prompt: str | None = None, sample_index: int = 0) -> Any:
        """Returns what `check` makes of the reply's JSON object.

        Args:
          task: what is asked; part of the payload, and the name of the prompt unless `prompt` is.
          payload: what the model sees, as one JSON object.
          check: reads the reply; raises BadReply for one that does not do.

        Raises:
          Rejected: every reply was bad; the reason is the last one's.
          ChatError: the endpoint failed.
          Stopped: the run is to end.
        """
        name = prompt or task
        last: list[BadReply] = []

        def read(text):
            try:
                return check(_object_of(text))
            except BadReply as error:
                last[:] = [error]
                raise

        messages = [
            {"role": "system", "content": self.prompts[name]},
            {"role": "user", "content": json.dumps({"task": task} | payload, ensure_ascii=False)},
        ]
        try:
            reply = await self.client.complete(messages, sample_index=sample_index, check=read,
                                               schema=self.schemas.get(name))
        except ChatError as error:
            if last and error.kind == "parse":
                raise Rejected(last[0].reason, last[0].detail) from None
            raise
        return reply.parsed


def _object_of(text: str) -> dict:
    try:
        return read_object(text)
    except ValueError:
        raise BadReply("malformed_reply", f"no JSON object in {text[:200]!r}") from None


def text_of(reply: Mapping, key: str, where: str = "") -> str:
    """Returns the text under a key of a reply, stripped.

    Raises:
      BadReply: there is none.
    """
    value = reply.get(key) if isinstance(reply, Mapping) else None
    if not isinstance(value, str) or not value.strip():
        raise BadReply("malformed_reply", f"{where}{key} is missing, empty or no text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadReply("malformed_reply", f"{where}{key} holds half of a surrogate pair") from None
    return value.strip()


def list_of(reply: Mapping, key: str, where: str = "") -> list:
    """Returns the list under a key of a reply, which holds something.

    Raises:
      BadReply: there is none.
    """
    value = reply.get(key) if isinstance(reply, Mapping) else None
    if not isinstance(value, list) or not value:
        raise BadReply("malformed_reply", f"{where}{key} is missing, empty or no list")
    return value


def truth_of(reply: Mapping, key: str, where: str = "") -> bool:
    """Returns the truth value under a key of a reply.

    Raises:
      BadReply: there is none.
    """
    value = reply.get(key) if isinstance(reply, Mapping) else None
    if not isinstance(value, bool):
        raise BadReply("malformed_reply", f"{where}{key} is missing or neither true nor false")
    return value
