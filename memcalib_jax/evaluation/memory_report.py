"""Results of memory evaluations over seeds, and tables of several side by side (Memory-R2, 4)."""

import json
import pathlib
from collections.abc import Mapping, Sequence

from memcalib_jax.evaluation.metrics import mean_and_std

FORMAT = "memcalib_jax.memory/1"
METRICS = {"f1": "F1", "bleu_1": "BLEU-1", "judge": "Judge", "m_fail": "M-Fail",
           "retrieval_failure": "Retrieval failure"}
"""Columns of the tables, in percent; of the last two less is better."""


def over_seeds(summaries: Sequence[Mapping]) -> dict:
    """Returns mean and deviation (n - 1) over seeds of every number, in the summaries' own form.

    What a seed lacks, or has no value of, is left out of both; a number that no seed has is None.
    Where a summary has a number, the result has {"mean": ..., "std": ...}.
    """
    keys = dict.fromkeys(key for summary in summaries for key in summary)
    combined = {}
    for key in keys:
        values = [summary[key] for summary in summaries if summary.get(key) is not None]
        if not values:
            combined[key] = None
        elif isinstance(values[0], Mapping):
            combined[key] = over_seeds(values)
        else:
            combined[key] = dict(zip(("mean", "std"), mean_and_std(values)))
    return combined


def load_memory_results(folder: pathlib.Path) -> dict:
    """Reads the results of an evaluation.

    Raises:
      ValueError: there are none, or of another kind.
    """
    path = folder / "results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; is the evaluation finished?") from None
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise ValueError(f"{path} holds no results of experiments.evaluate_memory")
    return results


def cell(value: Mapping | None, digits: int = 2) -> str:
    """Writes a mean with its deviation, a dash where there is no value."""
    if value is None:
        return "-"
    text = f"{value['mean']:.{digits}f}"
    return text if value["std"] is None else f"{text} ± {value['std']:.{digits}f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lays a table out as Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def results_table(results: Mapping) -> str:
    """Returns one evaluation's table: all questions, then by category and by stage."""
    rows = []
    groups = [("all", results["summary"]["all"])]
    for kind in ("category", "stage"):
        groups += [(f"{kind} {name}" if kind == "stage" else name, values)
                   for name, values in results["summary"][kind].items()]
    for name, values in groups:
        rows.append([name, f"{values['questions']['mean']:g}",
                     *(cell(values[metric]) for metric in METRICS)])
    return markdown(["questions", "number", *METRICS.values()], rows)


def comparison_tables(runs: Mapping[str, Mapping]) -> str:
    """Returns tables of several evaluations: overall, and F1 by category, stage and session.

    Raises:
      ValueError: they asked different questions.
    """
    first = next(iter(runs))
    for name, results in runs.items():
        if results["questions_sha256"] != runs[first]["questions_sha256"]:
            raise ValueError(f"{name} and {first} asked different questions, so that their "
                             "figures cannot be compared: evaluate both on the same conversations")
    parts = ["### All questions\n", markdown(
        ["method", *METRICS.values(), "entries", "seconds a conversation", "tokens a conversation"],
        [[name, *(cell(results["summary"]["all"][metric]) for metric in METRICS),
          cell(_last(results["growth"]), 1), cell(results["seconds"], 1),
          cell((results["tokens"] or {}).get("per_conversation"), 0)]
         for name, results in runs.items()])]
    for kind in ("category", "stage", "session"):
        names = dict.fromkeys(group for results in runs.values()
                              for group in results["summary"][kind])
        parts += [f"\n### F1 by {kind}\n", markdown(
            ["method", *names],
            [[name, *(cell((results["summary"][kind].get(group) or {}).get("f1"))
                      for group in names)] for name, results in runs.items()])]
    return "\n".join(parts) + "\n"


def _last(growth: Mapping) -> Mapping | None:
    """Returns the entries after the last session."""
    return growth[max(growth, key=int)]["entries"] if growth else None
