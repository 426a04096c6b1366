"""The paper's tables of results, made from evaluations and laid out as Markdown or LaTeX."""

import dataclasses
from collections.abc import Mapping, Sequence

from memcalib_jax.credit import CHANNELS
from memcalib_jax.evaluation.summary import HIGHER_IS_BETTER, METRICS

CAPTIONS = {
    1: "Memory use of models",
    2: "Main results across models",
    3: "Localization ablations",
    9: "Complete results across models",
    10: "Channel proportions, in percent of the atoms of an ideal level, pooled over seeds",
    12: "Sensitivity to the localization coefficient",
    13: "Results under another judge",
    14: "Agreement of two judges over methods",
}
_MEAN_STD = " (mean ± standard deviation over seeds, n - 1)"
_FIRST_COLUMN = {1: "Model", 3: "Variant", 12: "η", 13: "Method"}

# What two evaluations of one table may differ in, but a reader must know of.
_SETTINGS = ("num_seeds", "representation", "temperature", "top_p", "max_response_tokens",
             "judge_prompt_file")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A figure as text; `mark` is "best", "second" or nothing."""

    text: str
    mark: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table without its layout.

    Attributes:
      number: the paper's.
      header: the columns' names; columns of figures may have a group, (group, name).
      rows: texts of the first columns, then cells.
      marks: what the best and the second mark mean.
      notes: what a reader must know of the figures.
    """

    number: int
    header: list[str | tuple[str, str]]
    rows: list[list[str | Cell]]
    marks: tuple[str, str] = ("best", "second best")
    notes: tuple[str, ...] = ()

    @property
    def caption(self) -> str:
        """The table's caption."""
        spread = "" if self.number in (10, 14) else _MEAN_STD
        return CAPTIONS[self.number] + spread


def check_comparable(runs: Mapping[str, dict]):
    """Refuses results that do not belong in one table.

    Args:
      runs: evaluations' results by label.

    Raises:
      ValueError: two differ in records or judge; names them.
    """
    (first, reference), *others = runs.items()
    for label, results in runs.items():
        if not results["records"].get("sha256"):
            raise ValueError(f"{label}: results without a hash of their records, from an earlier "
                             "version; start its evaluation again to renew them (nothing is asked "
                             "twice)")
    for label, results in others:
        if results["records"]["sha256"] != reference["records"]["sha256"]:
            counts = [side["records"]["answered"] for side in (reference, results)]
            raise ValueError(f"{first} and {label} answer different records ({counts[0]} and "
                             f"{counts[1]}): results of different test sets are no one table")
        judges = [side["judge"]["model"] for side in (reference, results)]
        if judges[0] != judges[1]:
            raise ValueError(f"{first} and {label} were judged by different models ({judges[0]} "
                             f"and {judges[1]}); rejudge one of them")


def notes_of(runs: Mapping[str, dict]) -> tuple[str, ...]:
    """Says what a reader must know: no real judge, other settings, responses left out."""
    notes = list(dict.fromkeys(results["note"] for results in runs.values() if results["note"]))
    for name in _SETTINGS:
        by_value = {}
        for label, results in runs.items():
            by_value.setdefault(str(results["settings"].get(name)), []).append(label)
        if len(by_value) > 1:
            notes.append(f"Not like for like: {name} is " + "; ".join(
                f"{value} ({', '.join(labels)})" for value, labels in by_value.items()))
    for label, results in runs.items():
        responses = sum(seed["responses"] for seed in results["seeds"])
        if results["overall"]["valid"] < responses:
            notes.append(f"{label}: {responses - results['overall']['valid']} of {responses} "
                         "responses have no valid judgment and are left out")
    return tuple(notes)


def metric_table(number: int, runs: Mapping[str, dict]) -> Table:
    """Makes tables 1, 3, 12 and 13: a row a run, the six metrics as columns.

    Raises:
      ValueError: the runs are not comparable.
    """
    check_comparable(runs)
    rows = [[label, *cells] for label, cells in zip(runs, _columns(list(runs.values()), METRICS))]
    return Table(number, [_FIRST_COLUMN[number], *map(_directed, METRICS)], rows,
                 notes=notes_of(runs))


def main_table(groups: Mapping[str, Mapping[str, dict]]) -> Table:
    """Makes table 2: a row a method, SCS and Exact of each model; marks are within a model.

    Args:
      groups: results by model and method. Where a model lacks a method there is a dash.

    Raises:
      ValueError: the runs are not comparable.
    """
    flat = _flat(groups)
    check_comparable(flat)
    methods = list(dict.fromkeys(method for runs in groups.values() for method in runs))
    cells = {model: dict(zip(runs, _columns(list(runs.values()), HIGHER_IS_BETTER)))
             for model, runs in groups.items()}
    rows = [[method, *(cell for model in groups for cell in cells[model].get(
        method, [Cell("-")] * len(HIGHER_IS_BETTER)))] for method in methods]
    header = ["Method", *((model, _directed(name)) for model in groups
                          for name in HIGHER_IS_BETTER)]
    return Table(2, header, rows, notes=notes_of(flat))


def complete_table(groups: Mapping[str, Mapping[str, dict]]) -> Table:
    """Makes table 9: a row a model and method, all metrics; marks are within a model.

    Raises:
      ValueError: the runs are not comparable.
    """
    flat = _flat(groups)
    check_comparable(flat)
    rows = [[model, method, *cells] for model, runs in groups.items()
            for method, cells in zip(runs, _columns(list(runs.values()), METRICS))]
    return Table(9, ["Model", "Method", *map(_directed, METRICS)], rows, notes=notes_of(flat))


def channel_table(runs: Mapping[str, dict]) -> Table:
    """Makes table 10: the channels of two runs, and the change, taken before rounding.

    Raises:
      ValueError: they are not two, or not comparable.
    """
    if len(runs) != 2:
        raise ValueError(f"table 10 compares two runs, not {len(runs)}: give the one before and "
                         "the one after")
    check_comparable(runs)
    before, after = runs.values()
    lines = [(name, *(results["channels"][name]["of_ideal"] for results in (before, after)))
             for name in CHANNELS]
    lines.append(("Macro-averaged accuracy", before["macro_accuracy"], after["macro_accuracy"]))
    rows = []
    for name, first, second in lines:
        change = Cell("-")
        if first is not None and second is not None:
            better = (second > first) == (name[-1] != "-")
            change = Cell(f"{second - first:+.2f}",
                          "" if second == first else "best" if better else "second")
        rows.append([name, Cell(_figure(first)), Cell(_figure(second)), change])
    return Table(10, ["Channel", *(f"{label} (%)" for label in runs), "Change"], rows,
                 ("for the better", "for the worse"), notes_of(runs))


def agreement_table(comparison: dict) -> Table:
    """Makes table 14 from what experiments.rejudge wrote: correlations over methods, a metric each.

    The share of atoms at the same level is in the notes, a method each.

    Raises:
      ValueError: it compares a single evaluation.
    """
    if comparison["metrics"] is None:
        raise ValueError("a correlation needs two evaluations at least: rejudge more than one")
    rows = [[name, *(Cell(_figure(comparison["metrics"][name][kind], 3))
                     for kind in ("spearman", "pearson"))] for name in METRICS]
    notes = [comparison["note"]] if comparison["note"] else []
    notes.append(f"{' and '.join(comparison['judges'])}, over {len(comparison['atoms'])} methods")
    notes += [f"{name}: {_figure(atoms['agreement'])}% of {atoms['atoms']} atoms at the same level"
              + (f", {atoms['responses_left_out']} responses left out"
                 if atoms["responses_left_out"] else "")
              for name, atoms in comparison["atoms"].items()]
    return Table(14, ["Metric", "Spearman", "Pearson"], rows, notes=tuple(notes))


def _flat(groups):
    return {f"{model}/{method}": results for model, runs in groups.items()
            for method, results in runs.items()}


def _directed(metric):
    return f"{metric} {'↑' if metric in HIGHER_IS_BETTER else '↓'}"


def _figure(value, digits=2):
    return "-" if value is None else f"{value:.{digits}f}"


def _columns(runs: Sequence[dict], metrics: Sequence[str]) -> list[list[Cell]]:
    """Returns each run's cells, with the best and the second best of each metric marked.

    Equal means share a mark; a single run, or runs that are all equal, get none.
    """
    cells = [[] for _ in runs]
    for metric in metrics:
        means = [results["overall"]["mean"][metric] for results in runs]
        ranked = sorted({mean for mean in means if mean is not None},
                        reverse=metric in HIGHER_IS_BETTER)
        marks = dict(zip(ranked, ("best", "second"))) if len(ranked) > 1 else {}
        for row, results, mean in zip(cells, runs, means):
            std = results["overall"]["std"][metric]
            spread = "" if std is None else f" ± {std:.2f}"
            row.append(Cell(_figure(mean) + spread, marks.get(mean, "")))
    return cells


def markdown(table: Table) -> str:
    """Lays a table out as Markdown: the best in bold, the second best underlined."""
    marked = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}

    def shown(cell):
        if isinstance(cell, Cell):
            return marked[cell.mark].format(cell.text)
        return cell.replace("|", "\\|")

    header = [name if isinstance(name, str) else " ".join(name) for name in table.header]
    texts = sum(isinstance(cell, str) for cell in table.rows[0])
    lines = [f"**Table {table.number}.** {table.caption}.", "",
             f"| {' | '.join(map(shown, header))} |",
             "|" + " --- |" * texts + " ---: |" * (len(header) - texts)]
    lines += [f"| {' | '.join(map(shown, row))} |" for row in table.rows]
    if _has_marks(table):
        lines += ["", f"Bold: {table.marks[0]}; underlined: {table.marks[1]}."]
    return "\n".join([*lines, *(f"\n{note}." for note in table.notes)]) + "\n"


def latex(table: Table) -> str:
    """Lays a table out as LaTeX for booktabs and xcolor: the best in red, the second in blue."""
    marked = {"best": r"\textcolor{{red}}{{{}}}", "second": r"\textcolor{{blue}}{{{}}}", "": "{}"}

    def shown(cell):
        if isinstance(cell, Cell):
            return marked[cell.mark].format(_escaped(cell.text))
        if cell in CHANNELS:
            return f"${cell[:-1]}^{{{cell[-1]}}}$"
        return _escaped(cell)

    texts = sum(isinstance(cell, str) for cell in table.rows[0])
    lines = [r"\begin{table}[t]", r"\centering"]
    caption = [f"{table.caption}."]
    if _has_marks(table):
        caption.append(f"Red: {table.marks[0]}; blue: {table.marks[1]}.")
    caption += [f"{note}." for note in table.notes]
    lines += [rf"\caption{{{_escaped(' '.join(caption))}}}",
              rf"\begin{{tabular}}{{{'l' * texts}{'r' * (len(table.header) - texts)}}}",
              r"\toprule"]
    groups = [name[0] if isinstance(name, tuple) else "" for name in table.header]
    if any(groups):
        lines.append(" & ".join(_spans(groups)) + r" \\")
    lines.append(" & ".join(shown(name if isinstance(name, str) else name[1])
                            for name in table.header) + r" \\")
    lines.append(r"\midrule")
    lines += [" & ".join(map(shown, row)) + r" \\" for row in table.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _spans(groups):
    """Returns the cells of the line above the header: a group over its columns."""
    spans, place = [], 0
    while place < len(groups):
        width = 1
        while groups[place] and place + width < len(groups) and (
                groups[place + width] == groups[place]):
            width += 1
        spans.append(rf"\multicolumn{{{width}}}{{c}}{{{_escaped(groups[place])}}}"
                     if groups[place] else "")
        place += width
    return spans


def _has_marks(table):
    return any(isinstance(cell, Cell) and cell.mark for row in table.rows for cell in row)


_ESCAPES = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "η": r"$\eta$"}


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in text)
