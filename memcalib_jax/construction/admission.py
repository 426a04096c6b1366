"""The sources that passed the deterministic filters, once and for all of a run."""

import itertools
import json
import pathlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from memcalib_jax.construction.screening import ScreeningLimits, admit
from memcalib_jax.construction.sources import FIELDS, SourceFile, read_rows
from memcalib_jax.files import write_json
from memcalib_jax.jsonlines import DamagedFile


class Admission:
    """Screens source files into a folder: admitted.jsonl, refused.jsonl and admission.json.

    The last is written last; where it is, nothing is screened again.

    Attributes:
      by_domain: number of admitted samples of each domain.
      refused: number of refused rows by reason.
      sources: hashes of the files that were screened.

    Raises:
      DamagedFile: admission.json is not what it was.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        path = folder / "admission.json"
        try:
            summary = json.loads(path.read_text())
            self.by_domain: Counter = Counter(summary["by_domain"])
            self.refused: Counter = Counter(summary["refused"])
            self.sources = list(summary["sources"])
        except (ValueError, TypeError, KeyError):
            raise _damaged(path, folder) from None

    @classmethod
    def open(cls, folder: pathlib.Path, files: Sequence[SourceFile], hashes: Sequence[str],
             field_map: Mapping[str, str] | None, limits: ScreeningLimits,
             max_per_domain: int | None = None) -> "Admission":
        """Screens the files in order, unless the folder has the outcome.

        Files may have come behind those that were screened before, which leaves these as they were.

        Args:
          folder: of the run.
          files, hashes, field_map: what to read, the hash of each file, and how.
          limits: of the filters.
          max_per_domain: further rows of a domain that has as many are not looked at.

        Raises:
          RecordError: a file cannot be read.
          DamagedFile: the outcome is of other files, or not what it was.
        """
        hashes = list(hashes)
        if (folder / "admission.json").exists():
            earlier = cls(folder)
            if earlier.sources == hashes:
                return earlier
            if earlier.sources != hashes[:len(earlier.sources)]:
                raise DamagedFile(f"{folder / 'admission.json'} is of other sources: name those "
                                  "first, unchanged and in their order, and new ones behind them")
            (folder / "admission.json").unlink()
        rows = itertools.chain.from_iterable(read_rows(file, field_map) for file in files)
        _screen(folder, rows, hashes, limits, max_per_domain)
        return cls(folder)

    @property
    def total(self) -> int:
        """Number of admitted samples."""
        return self.by_domain.total()

    def samples(self) -> Iterator[dict]:
        """Yields the admitted samples in order, without holding them.

        Raises:
          DamagedFile: they are not what was admitted.
        """
        path, number = self._folder / "admitted.jsonl", 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    yield json.loads(line)
        except (FileNotFoundError, ValueError):
            raise _damaged(path, self._folder) from None
        if number != self.total:
            raise _damaged(path, self._folder)


def _damaged(path, folder):
    return DamagedFile(f"{path} is damaged; remove {folder / 'admission.json'}, to screen the "
                       "sources again")


def _screen(folder: pathlib.Path, rows: Iterable, hashes: list[str], limits: ScreeningLimits,
            max_per_domain: int | None) -> None:
    by_domain, refused = Counter(), Counter()

    def wanted():
        for row in rows:
            domain = (row.sample or {}).get("domain")
            if max_per_domain is None or by_domain[domain] < max_per_domain:
                yield row

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "admitted.jsonl").open("wb") as kept, \
            (folder / "refused.jsonl").open("wb") as left:
        for row, rejected in admit(wanted(), limits):
            if rejected is None:
                by_domain[row.sample["domain"]] += 1
                _write(kept, {name: row.sample[name] for name in FIELDS})
            else:
                refused[rejected.reason] += 1
                _write(left, {"place": row.place, "id": (row.sample or {}).get("id"),
                              "reason": rejected.reason, "detail": rejected.detail})
    write_json(folder / "admission.json", {"by_domain": dict(sorted(by_domain.items())),
                                           "refused": dict(sorted(refused.items())),
                                           "sources": hashes})


def _write(file, row):
    file.write(json.dumps(row).encode("ascii") + b"\n")
