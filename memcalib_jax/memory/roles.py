"""What each role is told, and what its replies are taken for."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from memcalib_jax import prompt_files
from memcalib_jax.api.replies import read_object
from memcalib_jax.memory.bank import Delete, Entry, Insert, NoOperation, Operation, Update
from memcalib_jax.memory.conversations import Session, Turn

PROMPT_NAMES = ("extract", "manage", "merged", "answer", "judge")

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_ANSWER_LINE = re.compile(r"^\W*(?:final\s+)?answer\W*:[^\w\n]*(.+?)\W*$",
                          re.IGNORECASE | re.MULTILINE)

LATER_CHUNK = ("The parts and replies above are for reference only: do not repeat their facts. "
               "This is the next part.\n\n")
"""Stands before every part of a session but the first."""


def _object(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties),
            "additionalProperties": False}


def _named(name: str, **properties) -> dict:
    return _object(operation={"type": "string", "enum": [name]}, **properties)


_TEXT = {"type": "string"}
_OPERATIONS = _object(operations={"type": "array", "items": {"anyOf": [
    _named("INSERT", speaker=_TEXT, content=_TEXT, dia_id=_TEXT),
    _named("UPDATE", memory_id=_TEXT, content=_TEXT, dia_id=_TEXT),
    _named("DELETE", memory_id=_TEXT), _named("NOOP")]}})

SCHEMAS = {
    "extract": _object(facts={"type": "array", "items": _object(
        speaker=_TEXT, dia_id=_TEXT, fact=_TEXT)}),
    "manage": _OPERATIONS,
    "merged": _OPERATIONS,
}
"""The forms of the replies, for endpoints that can keep a model to one."""


@dataclasses.dataclass(frozen=True)
class Fact:
    """What one turn says about one speaker."""

    speaker: str
    dia_id: str
    text: str


@dataclasses.dataclass(frozen=True)
class Parsed:
    """What could be read of a reply, and why the rest could not, one reason an item.

    A reply that is no JSON object at all is no item and one reason.
    """

    items: tuple
    problems: tuple[str, ...] = ()


def load_prompts(folder: str | Path | None = None) -> dict[str, str]:
    """Returns the roles' instructions by name, stripped; files in `folder` replace ours.

    Raises:
      ValueError: see `prompt_files.load_prompts`.
    """
    prompts = prompt_files.load_prompts(__package__, PROMPT_NAMES, folder)
    return {name: text.strip() for name, text in prompts.items()}


def extractor_text(session: Session, turns: Sequence[Turn], chunk: int) -> str:
    """Returns what the extractor reads of a chunk, which may have no turn."""
    lines = [f"[{turn.dia_id}] {turn.speaker}: {turn.shown}" for turn in turns]
    return "".join([LATER_CHUNK if chunk else "", f"Time of the session: {session.time}\n",
                    "\n".join(lines) or "(no further turn)"])


def manager_text(memories: Sequence[Entry], facts: Sequence[Fact],
                 related: Sequence[Sequence[str]], chunk: int) -> str:
    """Returns what the manager reads of a chunk: similar memories, and the facts to file.

    `related` holds, for each fact, the ids of the memories that were found for it.
    """
    value = {"memories": [_shown(entry) for entry in memories],
             "facts": [{"speaker": fact.speaker, "dia_id": fact.dia_id, "fact": fact.text,
                        "related_memory_ids": list(ids)} for fact, ids in zip(facts, related)]}
    return (LATER_CHUNK if chunk else "") + json.dumps(value, ensure_ascii=False)


def merged_text(session: Session, turns: Sequence[Turn], memories: Sequence[Entry],
                chunk: int) -> str:
    """Returns what a single role reads of a chunk: its turns and similar memories."""
    shown = json.dumps({"memories": [_shown(entry) for entry in memories]}, ensure_ascii=False)
    return f"{extractor_text(session, turns, chunk)}\n\n{shown}"


def answer_text(question: str, memories: Mapping[str, Sequence[Entry]]) -> str:
    """Returns what the answer agent reads: a block of memories a speaker, and the question."""
    blocks = []
    for speaker, entries in memories.items():
        lines = [f"- [{entry.time}] {entry.content}" for entry in entries]
        blocks.append("\n".join([f"Memories of {speaker}:", *(lines or ["(none)"])]))
    return "\n\n".join([*blocks, f"Question: {question}"])


def parse_facts(reply: str, speakers: Sequence[str]) -> Parsed:
    """Reads an extractor's reply into `Fact`s; a bad item is left out with its reason."""
    def fact(item):
        text = _text(item, "fact")
        return Fact(_speaker(item, speakers), _first_id(item), text)

    return _parse(reply, "facts", fact)


def parse_operations(reply: str, speakers: Sequence[str]) -> Parsed:
    """Reads a manager's reply into operations; a bad item is left out with its reason."""
    def operation(item) -> Operation:
        match _text(item, "operation").upper():
            case "INSERT" | "ADD":
                return Insert(_speaker(item, speakers), _text(item, "content"), _first_id(item))
            case "UPDATE":
                return Update(_text(item, "memory_id"), _text(item, "content"), _first_id(item))
            case "DELETE":
                return Delete(_text(item, "memory_id"))
            case "NOOP" | "NONE" | "NO_OP" | "NO OPERATION":
                return NoOperation()
            case name:
                raise ValueError(f"unknown operation {name[:20]!r}")

    return _parse(reply, "operations", operation)


def parse_answer(reply: str) -> tuple[str, bool]:
    """Returns the answer of a reply and whether it stood in its tag.

    The last tag counts. Without one, what follows the last "Answer:" is taken, else "".
    """
    tagged = _ANSWER_TAG.findall(reply)
    if tagged:
        return tagged[-1].strip(), True
    lines = _ANSWER_LINE.findall(reply)
    return (lines[-1].strip() if lines else ""), False


def _shown(entry: Entry) -> dict:
    return {"memory_id": entry.id, "session_time": entry.time, "speaker": entry.speaker,
            "content": entry.content, "dia_ids": list(entry.dia_ids)}


def _parse(reply: str, key: str, read: Callable[[dict], object]) -> Parsed:
    try:
        rows = read_object(reply).get(key)
    except ValueError:
        return Parsed((), ("no JSON object",))
    if not isinstance(rows, list):
        return Parsed((), (f"no list of {key}",))
    items, problems = [], []
    for row in rows:
        try:
            items.append(read(row))
        except ValueError as error:
            problems.append(str(error))
    return Parsed(tuple(items), tuple(problems))


def _text(item, name):
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"no {name}")
    return " ".join(value.split())


def _speaker(item, speakers):
    """Returns the speaker's name as the conversation has it."""
    given = _text(item, "speaker")
    for speaker in speakers:
        if given.casefold() == speaker.casefold():
            return speaker
    raise ValueError("unknown speaker")


def _first_id(item):
    """Returns the turn's id; of several, in a list or with commas, the first."""
    value = item.get("dia_id")
    if isinstance(value, list):
        value = value[0] if value else None
    if not isinstance(value, str) or not value.split(",")[0].strip():
        raise ValueError("no dia_id")
    return value.split(",")[0].strip().strip("[]")
