"""Stage 2, query and memory derivation: what a source tells of its asker, and what is left to ask.

Coding questions become natural-language tasks, whose answers are prose (B.2).
"""

import re

from memcalib_jax.construction.decisions import Asker, BadReply, Rejected, list_of, text_of
from memcalib_jax.construction.sources import FIELDS

TASK_KINDS = ("planning", "behavior_prediction", "code_understanding", "debugging")
"""What a coding query may ask for."""

_LEAK_WORDS = 6
_WORD = re.compile(r"[^\W_]+")


async def derive(sample: dict, ask: Asker) -> dict:
    """Asks for the memory passages of a source and the query that is left without them.

    Every passage comes with words of the source that it rests on, so that nothing is invented.

    Raises:
      Rejected: no_memory, or a bad reply: unfaithful_quote, query_leaks, unknown_task_kind,
        code_in_query, malformed_reply.
    """
    coding = sample["domain"] == "coding"
    payload = {name: sample[name] for name in FIELDS[2:]}
    derived = await ask("derive", payload, lambda reply: read_derivation(reply, sample),
                        prompt="derive_coding" if coding else "derive")
    if not derived["passages"]:
        raise Rejected("no_memory", "the model found nothing to remember")
    return derived


def read_derivation(reply: dict, sample: dict) -> dict:
    """Reads `query`, `passages` (`text` and `quotes` each) and, of code, `task_kind`.

    Raises:
      BadReply: something is missing, a quote is not in the source, or the query tells one.
    """
    if reply.get("passages") == []:
        return {"passages": [], "query": ""}
    source = _plain(f"{sample['context']}\n{sample['question']}")
    passages = []
    for number, item in enumerate(list_of(reply, "passages"), start=1):
        where = f"passage {number}: "
        quotes = list_of(item, "quotes", where)
        for quote in quotes:
            if not isinstance(quote, str) or not _plain(quote) or _plain(quote) not in source:
                raise BadReply("unfaithful_quote", f"{where}{quote!r} is not in the source")
        passages.append({"text": text_of(item, "text", where), "quotes": quotes})
    derived = {"query": text_of(reply, "query"), "passages": passages}
    _refuse_leak(derived)
    if sample["domain"] == "coding":
        derived["task_kind"] = text_of(reply, "task_kind")
        if derived["task_kind"] not in TASK_KINDS:
            raise BadReply("unknown_task_kind", f"{derived['task_kind']!r} is none of "
                                                f"{', '.join(TASK_KINDS)}")
        if "```" in derived["query"]:
            raise BadReply("code_in_query", "the query holds a block of code")
    return derived


def _refuse_leak(derived: dict) -> None:
    """Refuses a query that repeats a run of words of a passage or of what it rests on."""
    query = _plain(derived["query"])
    for passage in derived["passages"]:
        for text in (passage["text"], *passage["quotes"]):
            words = _plain(text).split()
            runs = (words[start:start + _LEAK_WORDS]
                    for start in range(max(1, len(words) - _LEAK_WORDS + 1)))
            for run in runs:
                if len(run) == _LEAK_WORDS and f" {' '.join(run)} " in f" {query} ":
                    raise BadReply("query_leaks", f"the query repeats {' '.join(run)!r}")


def _plain(text: str) -> str:
    """Keeps the words alone: quotes may differ in case, punctuation and spaces."""
    return " ".join(_WORD.findall(text.casefold()))
