"""A judge's reply, read strictly."""

from collections.abc import Sequence
from dataclasses import dataclass

from memcalib_jax.api.replies import read_object
from memcalib_jax.data import LEVELS, Atom


@dataclass(frozen=True)
class AtomJudgment:
    """Holds one atom's use level (an index into `LEVELS`) with the judge's evidence."""

    atom_id: str
    level: int
    evidence_quote: str
    reason: str


@dataclass(frozen=True)
class Judgment:
    """Holds the use levels of a response, or why there are none.

    `levels` and `details` follow the order of the record's atoms; of an invalid judgment, `levels`
    is None, `details` empty, and `reason` says why, as a kind, or a kind, a colon and a message.
    """

    levels: tuple[int, ...] | None
    valid: bool
    reason: str | None = None
    details: tuple[AtomJudgment, ...] = ()

    @classmethod
    def invalid(cls, reason: str) -> "Judgment":
        """Makes the judgment of a response that could not be judged."""
        return cls(None, False, reason)


def parse_judgment(text: str, atoms: Sequence[Atom], *, blind: bool = False) -> Judgment:
    """Reads a judge's reply: one JSON object, bare, fenced, or between other words.

    Its `atom_judgments` list must hold each atom exactly once: `atom_id`, `u_star` equal to the
    ideal level (not of a `blind` judge, who does not know it), `predicted_usage_level`,
    `evidence_quote` and `reason`. Whether the quote stands in the response is not checked.

    Raises:
      ValueError: anything else; the message names the atom and field.
    """
    reply = read_object(text)
    items = reply.get("atom_judgments")
    if not isinstance(items, list):
        raise ValueError("atom_judgments is missing or no list")
    expected = {atom.id: atom for atom in atoms}
    found = {}
    for place, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(f"atom_judgments[{place}] is no object")
        atom_id = item.get("atom_id")
        if not isinstance(atom_id, str):
            raise ValueError(f"atom_judgments[{place}]: atom_id is missing or no string")
        if atom_id not in expected:
            raise ValueError(f"unknown atom {atom_id!r}")
        if atom_id in found:
            raise ValueError(f"atom {atom_id!r} is judged twice")
        found[atom_id] = _atom_judgment(item, expected[atom_id], blind)
    missing = [atom_id for atom_id in expected if atom_id not in found]
    if missing:
        raise ValueError(f"no judgment of {', '.join(map(repr, missing))}")
    details = tuple(found[atom.id] for atom in atoms)
    return Judgment(tuple(detail.level for detail in details), True, None, details)


def _atom_judgment(item, atom, blind):
    where = f"atom {atom.id!r}"
    known = () if blind else ("u_star",)
    for field in (*known, "predicted_usage_level", "evidence_quote", "reason"):
        if not isinstance(item.get(field), str):
            raise ValueError(f"{where}: {field} is missing or no string")
    if not blind and item["u_star"] != LEVELS[atom.ideal]:
        raise ValueError(f"{where}: u_star is {item['u_star']!r}, not {LEVELS[atom.ideal]!r}")
    letter = item["predicted_usage_level"]
    if letter not in tuple(LEVELS):
        allowed = ", ".join(LEVELS)
        raise ValueError(f"{where}: predicted_usage_level is {letter!r}, not one of {allowed}")
    return AtomJudgment(atom.id, LEVELS.index(letter), item["evidence_quote"], item["reason"])
