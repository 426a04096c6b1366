"""MemCalib records: a question, memory blocks, and atoms with their ideal use levels."""

import os
from collections import Counter
from dataclasses import dataclass

from memcalib_jax.data.jsonl import JsonObject, Oddities, read_objects

LEVELS = "ABC"
"""Letters of the use levels 0 (Ignore), 1 (Bound) and 2 (Control)."""

DOMAINS = ("coding", "general", "health_seed")
ACTIONS = ("apply", "correct", "ignore")

# The released files have no provenance; what construction/ builds has.
_RECORD_KEYS = {"id", "domain", "question", "memory_blocks", "memories", "provenance"}
_BLOCK_KEYS = {"parent_memory_id", "memory_text", "atomic_concat_text", "atom_ids"}
_ATOM_KEYS = {"atom_id", "parent_memory_id", "text", "u_star", "memory_action", "usage_rubric"}


@dataclass(frozen=True)
class Atom:
    """One proposition of a block.

    `ideal` is the level at which an answer should use it, an index into `LEVELS`; `action` is one
    of `ACTIONS`; `rubric` says what right, too little and too much use would look like.
    """

    id: str
    block_id: str
    text: str
    ideal: int
    action: str
    rubric: dict


@dataclass(frozen=True)
class Block:
    """One memory as an agent would retrieve it.

    `fluent_text` is its natural wording; `atomic_text` is the stripped texts of its atoms, in the
    order of `atom_ids`, joined by one space.
    """

    id: str
    fluent_text: str
    atomic_text: str
    atom_ids: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """One question with its memory blocks and their atoms, both in file order."""

    id: str
    domain: str
    question: str
    blocks: tuple[Block, ...]
    atoms: tuple[Atom, ...]


def load_records(path: str | os.PathLike) -> list[Record]:
    """Reads a MemCalib file in the released JSON Lines format.

    Args:
      path: a file, or hf://datasets/OWNER/NAME[@REVISION]/FILE on the Hugging Face hub.

    Raises:
      RecordError: the file cannot be read or holds no record, a line is not one JSON object, a
        field is missing, empty or of the wrong type, an id is repeated, or blocks and atoms do
        not fit together. The error names file, line, record and field.

    Warns once of each kind of odd but legal content: a domain outside `DOMAINS`, an unknown key, a
    record without Bound or Control atom, an action that contradicts the level (to ignore a Bound
    or Control atom; to apply or correct by an Ignore atom), a byte-order mark, blank lines.
    """
    path = os.fspath(path)
    oddities = Oddities(path)
    line_of_id: dict[str, int] = {}
    records = []
    for item in read_objects(path, oddities):
        record = _parse_record(item, oddities)
        if record.id in line_of_id:
            raise item.error(f"repeats the id of line {line_of_id[record.id]}", "id")
        line_of_id[record.id] = item.line
        records.append(record)
    oddities.warn()
    return records


def _parse_record(item: JsonObject, oddities: Oddities) -> Record:
    item.record_id = item.text("id")
    item.note_unknown_keys(_RECORD_KEYS, oddities)
    domain = item.text("domain")
    if domain not in DOMAINS:
        oddities.note("domain", item.line, f"domain {domain!r} is none of {', '.join(DOMAINS)}")
    question = item.text("question")
    block_items, atom_items = item.objects("memory_blocks"), item.objects("memories")
    if not block_items:
        raise item.error("must hold at least one block", "memory_blocks")
    blocks = [_parse_block(block_item, oddities) for block_item in block_items]
    atoms = [_parse_atom(atom_item, oddities) for atom_item in atom_items]
    _check_distinct(block_items, blocks, "parent_memory_id")
    _check_distinct(atom_items, atoms, "atom_id")
    _check_membership(block_items, blocks, atom_items, atoms)
    _check_atomic_texts(block_items, blocks, atoms)
    if all(atom.ideal == LEVELS.index("A") for atom in atoms):
        oddities.note("levels", item.line, f"record {item.record_id!r} has no B or C atom")
    return Record(item.record_id, domain, question, tuple(blocks), tuple(atoms))


def _parse_block(item: JsonObject, oddities: Oddities) -> Block:
    item.note_unknown_keys(_BLOCK_KEYS, oddities)
    atom_ids = tuple(item.texts("atom_ids"))
    if not atom_ids:
        raise item.error("must name at least one atom", "atom_ids")
    return Block(
        id=item.text("parent_memory_id"),
        fluent_text=item.text("memory_text"),
        atomic_text=item.text("atomic_concat_text"),
        atom_ids=atom_ids,
    )


def _parse_atom(item: JsonObject, oddities: Oddities) -> Atom:
    item.note_unknown_keys(_ATOM_KEYS, oddities)
    level, action = item.text("u_star"), item.text("memory_action")
    if level not in tuple(LEVELS):
        raise item.error(f"must be one of {', '.join(LEVELS)}, not {level!r}", "u_star")
    if action not in ACTIONS:
        problem = f"must be one of {', '.join(ACTIONS)}, not {action!r}"
        raise item.error(problem, "memory_action")
    if (level == "A") != (action == "ignore"):
        what = f"{item.prefix}: action {action!r} contradicts level {level}; the level counts"
        oddities.note("action", item.line, what)
    return Atom(
        id=item.text("atom_id"),
        block_id=item.text("parent_memory_id"),
        text=item.text("text"),
        ideal=LEVELS.index(level),
        action=action,
        rubric=item.get("usage_rubric", dict),
    )


def _check_distinct(items: list[JsonObject], parts: list, key: str) -> None:
    seen = set()
    for item, part in zip(items, parts, strict=True):
        if part.id in seen:
            raise item.error(f"{part.id!r} is repeated in this record", key)
        seen.add(part.id)


def _check_membership(
    block_items: list[JsonObject],
    blocks: list[Block],
    atom_items: list[JsonObject],
    atoms: list[Atom],
) -> None:
    """Checks that every atom is in exactly one block, the one that it names."""
    atom_by_id = {atom.id: atom for atom in atoms}
    mentions = Counter(atom_id for block in blocks for atom_id in block.atom_ids)
    for item, block in zip(block_items, blocks, strict=True):
        for atom_id in block.atom_ids:
            if atom_id not in atom_by_id:
                raise item.error(f"names atom {atom_id!r}, which memories lacks", "atom_ids")
            if mentions[atom_id] > 1:
                raise item.error(f"names atom {atom_id!r}, which is listed twice", "atom_ids")
    for item, atom in zip(atom_items, atoms, strict=True):
        home = next((block.id for block in blocks if atom.id in block.atom_ids), None)
        if home is None:
            raise item.error(f"atom {atom.id!r} is in no block", "atom_id")
        if home != atom.block_id:
            problem = f"is {atom.block_id!r}, but atom {atom.id!r} is listed by block {home!r}"
            raise item.error(problem, "parent_memory_id")


def _check_atomic_texts(
    block_items: list[JsonObject], blocks: list[Block], atoms: list[Atom]
) -> None:
    text_by_id = {atom.id: atom.text.strip() for atom in atoms}
    for item, block in zip(block_items, blocks, strict=True):
        if block.atomic_text != " ".join(text_by_id[atom_id] for atom_id in block.atom_ids):
            problem = "must be the stripped texts of the block's atoms, joined by one space"
            raise item.error(problem, "atomic_concat_text")
