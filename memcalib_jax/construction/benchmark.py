"""Finished samples as a benchmark: records with provenance, and what tables 6 and 7 say of them."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from memcalib_jax.construction.assurance import record_of
from memcalib_jax.data.near_identical import near_identical
from memcalib_jax.data.records import LEVELS, Record


def make_record(sample: Mapping, pipeline: str, frozen: bool) -> dict:
    """Lays a finished sample out as a record, with where it comes from.

    Args:
      sample: with all that the stages added.
      pipeline: the hash of the pipeline that made it.
      frozen: whether that pipeline passed its pilot.
    """
    origins = {"source": "source", "hard": "hard_distractor", "other": "distractor"}
    record = record_of(sample)
    record["provenance"] = {
        "pipeline": pipeline,
        "frozen": frozen,
        "source": sample["source"],
        "source_id": sample["id"],
        "atom_origins": [origins[atom["origin"]] for atom in sample["atoms"]],
    } | ({"task_kind": sample["task_kind"]} if "task_kind" in sample else {})
    return record


def without_near_identical(records: Sequence[dict], threshold: float
                           ) -> tuple[list[dict], list[tuple[str, str]]]:
    """Leaves out each record whose question nearly repeats that of an earlier one that stays.

    So any split of what is left is disjoint by near-duplicates too.

    Returns:
      The records that stay, and (id left out, id of its twin) pairs.
    """
    questions = [record["question"] for record in records]
    twins: dict[int, list[int]] = {}
    for first, second, _ in near_identical(questions, questions, threshold=threshold):
        if first < second:
            twins.setdefault(second, []).append(first)
    left_out, stays = [], []
    gone = set()
    for place, record in enumerate(records):
        earlier = [twin for twin in twins.get(place, ()) if twin not in gone]
        if earlier:
            gone.add(place)
            left_out.append((record["id"], records[earlier[0]]["id"]))
        else:
            stays.append(record)
    return stays, left_out


def lines_of(records: Iterable[dict]) -> Iterator[bytes]:
    """Yields records as JSON Lines."""
    for record in records:
        yield json.dumps(record, ensure_ascii=False).encode() + b"\n"


def composition_rows(records: Sequence[Record]) -> list[list[str]]:
    """Counts examples, blocks and atoms of each domain and of all (table 6)."""
    return [[name, f"{len(part):,}", f"{sum(len(record.blocks) for record in part):,}",
             f"{sum(len(record.atoms) for record in part):,}"]
            for name, part in _by_domain(records)]


def structure_rows(records: Sequence[Record]) -> list[list[str]]:
    """Measures levels and blocks of each domain and of all (table 7).

    Share of atoms at each level, share of examples with a mixed-target block (atoms of two levels
    or more), and the least and most atoms per block and per example.
    """
    rows = []
    for name, part in _by_domain(records):
        levels = Counter(atom.ideal for record in part for atom in record.atoms)
        mixed = sum(has_mixed_block(record) for record in part)
        block_sizes = [len(block.atom_ids) for record in part for block in record.blocks]
        sizes = [len(record.atoms) for record in part]
        rows.append([name,
                     *(f"{100 * levels[level] / levels.total():.1f}%"
                       for level in range(len(LEVELS))),
                     f"{100 * mixed / len(part):.1f}%",
                     f"{min(block_sizes)}-{max(block_sizes)}", f"{min(sizes)}-{max(sizes)}"])
    return rows


def has_mixed_block(record: Record) -> bool:
    """Says whether a block holds atoms of at least two ideal levels."""
    ideal = {atom.id: atom.ideal for atom in record.atoms}
    return any(len({ideal[atom_id] for atom_id in block.atom_ids}) > 1 for block in record.blocks)


def _by_domain(records: Sequence[Record]):
    domains = sorted({record.domain for record in records})
    for domain in domains:
        yield domain, [record for record in records if record.domain == domain]
    if len(domains) > 1:
        yield "all", list(records)
