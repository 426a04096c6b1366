"""Built-in sample: 48 records, and three judged responses to each."""

import importlib.resources
import os
from dataclasses import dataclass
from pathlib import Path

from memcalib_jax.data.jsonl import Oddities, read_objects
from memcalib_jax.data.records import LEVELS

VARIANTS = ("calibrated", "overuse", "underuse")

_KEYS = {"id", "variant", "response", "levels"}


@dataclass(frozen=True)
class SampleResponse:
    """One response to a record, and the level (an index into `LEVELS`) at which it uses each atom.

    Some responses of the variants "overuse" and "underuse" are bad advice by design: show the
    variant wherever one is shown.
    """

    record_id: str
    variant: str
    text: str
    levels: dict[str, int]


def sample_path(name: str) -> Path:
    """Returns the path of a built-in file: "records.jsonl" or "responses.jsonl".

    Raises:
      ValueError: there is no such file.
    """
    folder = Path(str(importlib.resources.files(__name__)))
    names = sorted(path.name for path in folder.glob("*.jsonl"))
    if name not in names:
        raise ValueError(f"the sample has no {name!r}, only {', '.join(names)}")
    return folder / name


def load_responses(path: str | os.PathLike) -> list[SampleResponse]:
    """Reads judged responses, one JSON object a line.

    Raises:
      RecordError: the file or a line is malformed, or a record's variant is repeated.
    """
    oddities = Oddities(os.fspath(path))
    responses, seen = [], set()
    for item in read_objects(path, oddities):
        item.record_id = item.text("id")
        item.note_unknown_keys(_KEYS, oddities)
        variant, levels = item.text("variant"), item.get("levels", dict)
        if variant not in VARIANTS:
            raise item.error(f"must be one of {', '.join(VARIANTS)}, not {variant!r}", "variant")
        if (item.record_id, variant) in seen:
            raise item.error(f"{variant!r} is repeated for this record", "variant")
        seen.add((item.record_id, variant))
        for atom_id, level in levels.items():
            if level not in tuple(LEVELS):
                problem = f"must be one of {', '.join(LEVELS)}, not {level!r}"
                raise item.error(problem, f"levels.{atom_id}")
        levels = {atom_id: LEVELS.index(level) for atom_id, level in levels.items()}
        responses.append(SampleResponse(item.record_id, variant, item.text("response"), levels))
    oddities.warn()
    return responses
