"""Reads what an evaluation left in its folder: results, responses and judgments."""

import dataclasses
import json
import pathlib

from experiments.common import UsageError, read_records
from memcalib_jax.data import Record
from memcalib_jax.evaluation.report import load_results
from memcalib_jax.judge import Judgment
from memcalib_jax.training.judging import Journal, judgment_from_json


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A finished evaluation.

    Attributes:
      folder: where it lies.
      results: its `results.json`.
      records: those that were answered, in the order of the file.
      texts: the responses `[seed][record]`.
      judgments: theirs.
    """

    folder: pathlib.Path
    results: dict
    records: list[Record]
    texts: list[list[str]]
    judgments: list[list[Judgment]]


def read_evaluation(folder: str, eval_file: str | None) -> Evaluation:
    """Reads the folder of an evaluation that has ended.

    Args:
      folder: the `--run_dir` of experiments.evaluate.
      eval_file: its records, if they are not where its settings say.

    Raises:
      UsageError: it has not ended, a file is damaged, or the records are not its own.
    """
    path = pathlib.Path(folder)
    try:
        results = load_results(path)
    except ValueError as error:
        raise UsageError(str(error)) from None
    records = {record.id: record for record in read_records(
        eval_file or results["settings"]["eval_file"], held_out=True)}
    texts, judgments, answered = [], [], None
    for seed in range(len(results["seeds"])):
        responses = {row["id"]: row["text"]
                     for row in _rows(path / f"seed_{seed}" / "responses.jsonl", ("id", "text"))}
        unknown = next((record_id for record_id in responses if record_id not in records), None)
        if unknown is not None:
            raise UsageError(f"{path} answers record {unknown!r}, which is not among the records: "
                             "give the file that was evaluated as --eval_file")
        ids = [record_id for record_id in records if record_id in responses]
        if ids != (answered or ids) or len(ids) != results["records"]["answered"]:
            raise UsageError(f"{path}: the seeds answer different records, or not as many as "
                             "results.json says; start the evaluation again to complete it")
        answered = ids
        judged = _judgments(path / f"seed_{seed}" / "judgments.jsonl")
        texts.append([responses[record_id] for record_id in ids])
        judgments.append([
            _judgment(judged, records[record_id], responses[record_id], path) for record_id in ids])
    return Evaluation(path, results, [records[record_id] for record_id in answered], texts,
                      judgments)


def _judgments(path):
    """Returns the judgments of a journal; of repeated ones the last counts, as at a resume."""
    rows = _rows(path, ("id", "sample", "response_sha256", "valid"))
    try:
        return {(row["id"], row["sample"], row["response_sha256"]): judgment_from_json(row)
                for row in rows}
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{path}: a line is no judgment; evaluate again to mend it") from None


def _judgment(judged, record, text, path):
    judgment = judged.get(Journal.key(record, 0, text))
    if judgment is None:
        raise UsageError(f"{path}: the response to record {record.id!r} has no judgment; start the "
                         "evaluation again to complete it")
    if judgment.valid and [atom.atom_id for atom in judgment.details] != [
            atom.id for atom in record.atoms]:
        raise UsageError(f"{path}: record {record.id!r} has other atoms than were judged; give the "
                         "file that was evaluated as --eval_file")
    return judgment


def _rows(path, keys):
    """Reads JSON Lines without touching the file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not row.keys() >= set(keys):
            raise UsageError(f"{path}, line {number}: no object with {', '.join(keys)}; start the "
                             "evaluation again to complete it")
        rows.append(row)
    return rows
