"""Demonstrations: records with a response that a model should learn to give."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from memcalib_jax.data.jsonl import Oddities, read_objects
from memcalib_jax.data.records import Record
from memcalib_jax.data.sample import load_responses, sample_path


@dataclass(frozen=True)
class Demonstration:
    """A record and the text of a response to it."""

    record: Record
    response: str


def load_demonstrations(
    path: str | os.PathLike, records: Sequence[Record]
) -> list[Demonstration]:
    """Reads responses to records, one JSON object with `id` and `response` a line.

    Records without a response are left out; the others come in the order of `records`, whatever
    the order of the lines. Other keys are left out.

    Raises:
      RecordError: the file or a line is malformed, an id is none of the records' or is repeated;
        names it.
    """
    by_id = {record.id: record for record in records}
    responses: dict[str, str] = {}
    line_of: dict[str, int] = {}
    oddities = Oddities(os.fspath(path))
    for item in read_objects(path, oddities):
        item.record_id = item.text("id")
        if item.record_id not in by_id:
            raise item.error("is the id of none of the records: give the records that it answers "
                             "too, or take the line out", "id")
        if item.record_id in line_of:
            raise item.error(f"repeats the id of line {line_of[item.record_id]}", "id")
        line_of[item.record_id] = item.line
        responses[item.record_id] = item.text("response")
    oddities.warn()
    return [Demonstration(record, responses[record.id])
            for record in records if record.id in responses]


def sample_demonstrations(records: Sequence[Record]) -> list[Demonstration]:
    """Returns the built-in sample's calibrated responses to these of its records, in order."""
    texts = {response.record_id: response.text
             for response in load_responses(sample_path("responses.jsonl"))
             if response.variant == "calibrated"}
    return [Demonstration(record, texts[record.id]) for record in records]
