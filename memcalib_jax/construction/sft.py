"""Responses to learn from: written with guidance, kept if two verifiers approve (E.1)."""

import asyncio
from collections.abc import Callable, Sequence

from memcalib_jax.construction.decisions import (
    Asker,
    BadReply,
    Rejected,
    list_of,
    text_of,
    truth_of,
)
from memcalib_jax.data.records import LEVELS, Record


async def respond(sample: dict, *, record_of: Callable[[str], Record], generator: Asker,
                  verifiers: Sequence[Asker], max_rounds: int) -> dict:
    """Asks for a response by levels and rubrics until every verifier approves one.

    Args:
      sample: has the `id` of a record.
      record_of: gives the record.
      generator: writes; its rounds are told apart as samples, so its temperature should not be 0.
      verifiers: each judges every response by itself.
      max_rounds: most responses that are written.

    Returns:
      `response`, the `round` that it is of (from 1), and why each earlier one was rejected.

    Raises:
      Rejected: not_approved: no response was; the detail has the last one's faults. Or a bad reply.
    """
    record = record_of(sample["id"])
    rejected: list[list[str]] = []
    for round_ in range(max_rounds):
        response = await generator("respond", guidance(record), read_response, sample_index=round_)
        verdicts = await asyncio.gather(
            *(verify("verify", case(record, response), lambda reply: read_verdict(reply, record))
              for verify in verifiers), return_exceptions=True)
        for verdict in verdicts:
            if isinstance(verdict, BaseException):
                raise verdict
        faults = [f"verifier {number}: {fault}" for number, verdict in enumerate(verdicts, start=1)
                  for fault in verdict]
        if not faults:
            return {"response": response, "round": round_ + 1, "rejected": rejected}
        rejected.append(faults)
    raise Rejected("not_approved", f"{max_rounds} responses; the last: {'; '.join(rejected[-1])}")


def guidance(record: Record) -> dict:
    """Lays out what a response is written from: query, memories, levels and rubrics."""
    return {"query": record.question,
            "memories": [block.fluent_text for block in record.blocks],
            "guidance": [{"statement": atom.text, "level": LEVELS[atom.ideal],
                          "rubric": atom.rubric} for atom in record.atoms]}


def case(record: Record, response: str) -> dict:
    """Lays out what a verifier judges."""
    return {"query": record.question,
            "memories": [block.fluent_text for block in record.blocks],
            "response": response,
            "atoms": [{"id": atom.id, "text": atom.text, "level": LEVELS[atom.ideal],
                       "rubric": atom.rubric} for atom in record.atoms]}


def read_response(reply: dict) -> str:
    """Reads the `response` of a reply.

    Raises:
      BadReply: there is none.
    """
    return text_of(reply, "response")


def read_verdict(reply: dict, record: Record) -> list[str]:
    """Reads a verifier's reply as the list of faults it found; none approves.

    The levels found are compared with the ideal ones here: a model's own summary does not count.

    Raises:
      BadReply: an atom is missing, repeated or unknown, or a field is malformed.
    """
    ideal = {atom.id: LEVELS[atom.ideal] for atom in record.atoms}
    found: dict[str, str] = {}
    for item in list_of(reply, "atoms"):
        name, level = text_of(item, "id", "an atom: "), text_of(item, "level", "an atom: ")
        if name not in ideal:
            raise BadReply("unknown_atom", f"{name!r} is no atom")
        if name in found:
            raise BadReply("duplicate_atom", f"{name} is judged twice")
        if level not in tuple(LEVELS):
            raise BadReply("unknown_level", f"{name}: {level!r} is none of {', '.join(LEVELS)}")
        found[name] = level
    absent = ideal.keys() - found.keys()
    if absent:
        raise BadReply("missing_atom", f"{min(absent)} is not judged")
    faults = [f"{name} is at {found[name]}, not {level}" for name, level in ideal.items()
              if found[name] != level]
    reason = reply.get("reason") or "no reason given"
    return faults + [f"{name}: {reason}" for name in ("quality", "safe")
                     if not truth_of(reply, name)]
