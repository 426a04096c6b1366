"""Reads an endpoint's answer: the reply's text, why it ended, and the tokens it took."""

from memcalib_jax.api.connections import Answer
from memcalib_jax.api.failures import ChatError


def read_completion(answer: Answer) -> tuple[str, str | None]:
    """Returns a reply's text, "" where it has none, and its finish reason.

    Raises:
      ChatError: the answer is no chat completion.
    """
    try:
        choice = answer.value["choices"][0]
        text = choice["message"]["content"]
        finish_reason = choice.get("finish_reason")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        text = 0
    if not isinstance(text, str | None):
        raise ChatError("parse", "the endpoint's answer is no chat completion")
    return text or "", finish_reason


def read_usage(answer: Answer) -> dict[str, int]:
    """Returns `prompt_tokens` and `completion_tokens`; 0 where the answer does not say."""
    try:
        usage = answer.value["usage"]
    except (ValueError, TypeError, KeyError, RecursionError):
        usage = None
    usage = usage if isinstance(usage, dict) else {}
    counts = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
    return {name: value if isinstance(value, int) and value >= 0 else 0
            for name, value in counts.items()}


def cut_note(finish_reason: str | None) -> str:
    """Says of a reply that it was cut, for messages."""
    return " (it was cut at max_tokens)" if finish_reason == "length" else ""
