"""Counterfactual prompts: a record without some of its atoms."""

from collections.abc import Iterable

from memcalib_jax.data.prompts import compose
from memcalib_jax.data.records import Record


def ablate(
    record: Record, atom_ids: Iterable[str], *, representation: str = "atomic"
) -> list[dict]:
    """Makes the record's messages with the given atoms removed, all else unchanged.

    A touched block becomes the stripped texts of its remaining atoms joined by one space, also in
    the fluent representation; other blocks keep their text. An emptied block goes, and later
    blocks keep their numbers, so that a gap shows. With all blocks emptied, the memory section
    says that there are none. Removing nothing gives `build_messages(record)`.
    The memories without the atoms of one channel: section 3.2, arXiv 2609.24259.

    Raises:
      ValueError: the record lacks one of `atom_ids`, or `representation` is unknown.
    """
    removed = frozenset(atom_ids)
    unknown = removed - {atom.id for atom in record.atoms}
    if unknown:
        names = ", ".join(map(repr, sorted(unknown)))
        raise ValueError(f"record {record.id!r} has no atom {names}")
    return compose(record, removed, representation)
