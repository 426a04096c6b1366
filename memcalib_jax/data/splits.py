"""Splits of a list of records: by a list of ids, or by chance with equal shares per domain."""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from memcalib_jax.data.records import Record


def split_by_ids(
    records: Sequence[Record], ids: Sequence[str] | str | os.PathLike
) -> tuple[list[Record], list[Record]]:
    """Splits into (the rest, the records with these ids), both in the order of `records`.

    `ids` is a sequence of record ids, or the path of a text file with one id per line.

    Raises:
      ValueError: the file cannot be read, or an id is repeated or belongs to no record.
    """
    source = "ids"
    if isinstance(ids, str | os.PathLike):
        source, ids = os.fspath(ids), _read_ids(ids)
    _refuse_repeated(ids, source)
    unknown = sorted(set(ids) - {record.id for record in records})
    if unknown:
        names = ", ".join(map(repr, unknown[:5]))
        raise ValueError(f"{source}: {len(unknown)} of {len(ids)} ids name no record: {names}")
    return _partition(records, set(ids))


def stratified_split(
    records: Sequence[Record], held_out: int, *, seed: int
) -> tuple[list[Record], list[Record]]:
    """Splits into (the rest, `held_out` records), both in the order of `records`.

    Every domain gives its share of `held_out` (largest remainders; equal remainders in the order
    of the domains' names). Which of its records are held out depends on `seed` and their ids
    alone, not on their order; with one seed, a larger share contains a smaller one.

    Raises:
      ValueError: `held_out` is negative or exceeds the records, or an id is repeated.
    """
    if not 0 <= held_out <= len(records):
        raise ValueError(f"held_out must be from 0 to {len(records)} records, not {held_out}")
    _refuse_repeated([record.id for record in records], "records")
    ids_by_domain = defaultdict(list)
    for record in records:
        ids_by_domain[record.domain].append(record.id)
    shares = _largest_remainders({name: len(ids) for name, ids in ids_by_domain.items()}, held_out)
    chosen = set()
    for domain, ids in ids_by_domain.items():
        chosen.update(sorted(ids, key=lambda id: _draw(seed, id))[: shares[domain]])
    return _partition(records, chosen)


def _largest_remainders(counts: dict[str, int], total: int) -> dict[str, int]:
    whole = sum(counts.values()) or 1
    shares = {name: total * count // whole for name, count in counts.items()}
    by_remainder = sorted(counts, key=lambda name: (-(total * counts[name] % whole), name))
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


def _draw(seed: int, record_id: str) -> bytes:
    """Draws a sort key by hashing: the same on every platform and for any other records."""
    return hashlib.sha256(f"{seed}/{record_id}".encode()).digest()


def _partition(
    records: Sequence[Record], chosen: set[str]
) -> tuple[list[Record], list[Record]]:
    rest = [record for record in records if record.id not in chosen]
    return rest, [record for record in records if record.id in chosen]


def _refuse_repeated(ids: Sequence[str], source: str) -> None:
    repeated = [id for id, count in Counter(ids).items() if count > 1]
    if repeated:
        raise ValueError(f"{source}: id {repeated[0]!r} is repeated")


def _read_ids(path: str | os.PathLike) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the ids cannot be read ({error})") from None
    return [line.strip() for line in text.split("\n") if line.strip()]
