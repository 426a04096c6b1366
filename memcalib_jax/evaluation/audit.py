"""Which of a judge's decisions a person reads again, and the sheet for it (C, arXiv 2609.24259)."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memcalib_jax.data import LEVELS, Record
from memcalib_jax.sheets import cell, from_csv, read_answers, to_csv

SUBSETS = ("random", "stratified")
LEVEL_NAMES = ("Ignore", "Bound", "Control")
HUMAN_COLUMN = f"human_level ({', '.join(LEVELS)})"

_SHEET = ("row", HUMAN_COLUMN, "atom", "question", "memories", "response", "rubric")
_KEY = ("row", "subset", "seed", "record_id", "atom_id", "ideal", "judged")
_ANSWERS = {name.lower(): level for level, name in enumerate(LEVEL_NAMES)} | {
    letter.lower(): level for level, letter in enumerate(LEVELS)}


@dataclass(frozen=True)
class Pair:
    """An atom in a response, its ideal level and the judged one; `seed` numbers the response."""

    seed: int
    record_id: str
    atom_id: str
    ideal: int
    judged: int


def draw_audit(pairs: Sequence[Pair], num_random: int, num_stratified: int, *,
               seed: int) -> list[tuple[str, Pair]]:
    """Draws the pairs for a person to read, none twice, in an order that tells nothing.

    `num_random` are drawn from all; `num_stratified` from the others, as evenly over the nine
    combinations of ideal and judged level as these have pairs left.

    Returns:
      (member of `SUBSETS`, pair), shuffled.

    Raises:
      ValueError: there are fewer pairs than asked for.
    """
    if num_random + num_stratified > len(pairs):
        raise ValueError(f"{num_random} random and {num_stratified} stratified pairs are more than "
                         f"the {len(pairs)} that were judged")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(pairs))
    chosen = [("random", pairs[index]) for index in order[:num_random]]
    strata = [[] for _ in range(len(LEVELS) ** 2)]
    for index in order[num_random:]:
        strata[len(LEVELS) * pairs[index].ideal + pairs[index].judged].append(pairs[index])
    for stratum, count in zip(strata, allocate([len(s) for s in strata], num_stratified)):
        chosen += [("stratified", pair) for pair in stratum[:count]]
    return [chosen[index] for index in rng.permutation(len(chosen))]


def allocate(sizes: Sequence[int], total: int) -> list[int]:
    """Shares `total` out as evenly as sizes allow; of equals, the first get one more."""
    counts = [0] * len(sizes)
    while total > 0:
        open_ones = [index for index, size in enumerate(sizes) if counts[index] < size]
        if not open_ones:
            raise ValueError("the total is more than the sizes' sum")
        for index in open_ones[:total]:
            counts[index] += 1
        total -= len(open_ones[:total])
    return counts


def sheet_and_key(chosen: Sequence[tuple[str, Pair]], records: dict[str, Record],
                  responses: dict[tuple[int, str], str]) -> tuple[str, str]:
    """Writes the sheet for the annotator and the key, as CSV.

    The sheet has an empty column for the level, and neither the judge's level, nor the ideal one,
    nor the subset; the key has them by row number.

    Args:
      chosen: from `draw_audit`.
      records: by id.
      responses: texts, by seed and record id.
    """
    sheet, key = [_SHEET], [_KEY]
    for row, (subset, pair) in enumerate(chosen, start=1):
        record = records[pair.record_id]
        atom = next(atom for atom in record.atoms if atom.id == pair.atom_id)
        rubric = "\n".join(f"{name}: {_line(value)}" for name, value in atom.rubric.items())
        memories = "\n".join(f"[{number}] {block.fluent_text}"
                             for number, block in enumerate(record.blocks, start=1))
        response = responses[pair.seed, pair.record_id]
        sheet.append((row, "", *map(cell, (atom.text, record.question, memories, response,
                                            rubric))))
        key.append((row, subset, pair.seed, pair.record_id, pair.atom_id, LEVELS[pair.ideal],
                    LEVELS[pair.judged]))
    return to_csv(sheet), to_csv(key)


def read_audit(sheet: str, key: str) -> dict[str, tuple[list[int], list[int]]]:
    """Reads the filled sheet and its key back.

    Returns:
      For each subset that has rows: the human's levels and the judge's, in the key's order.

    Raises:
      ValueError: a column is missing, a row is missing, repeated, unknown or not filled in, or a
        level is none; says which rows.
    """
    keys = {line["row"]: line for line in from_csv(key, _KEY, "the key")}
    human = read_answers(sheet, HUMAN_COLUMN, list(keys), _ANSWERS, "level", LEVELS)
    found: dict[str, tuple[list[int], list[int]]] = {}
    for row, line in keys.items():
        if line["subset"] not in SUBSETS or line["judged"] not in tuple(LEVELS):
            raise ValueError(f"row {row} of the key has been changed")
        levels = found.setdefault(line["subset"], ([], []))
        levels[0].append(human[row])
        levels[1].append(LEVELS.index(line["judged"]))
    return {subset: found[subset] for subset in SUBSETS if subset in found}


def table(results: dict[str, dict]) -> str:
    """Lays out what `reader_agreement` gives for each subset as plain text."""
    lines = []
    for subset, figures in results.items():
        low, high = figures["interval"]
        lines += [
            f"{subset}: {figures['agreed']} of {figures['total']} agree, "
            f"{figures['agreement']:.1f}% (95% Wilson interval {low:.1f} to {high:.1f}), "
            f"kappa {figures['kappa']:.3f}; the judge is lower in {figures['lower']}, higher in "
            f"{figures['higher']}",
            f"{'':<16}" + "".join(f"{'judge ' + name:>18}" for name in LEVEL_NAMES)]
        for name, counts, shares in zip(LEVEL_NAMES, figures["confusion"], figures["row_percent"]):
            cells = [f"{count}" + ("" if share is None else f" ({share:.1f}%)")
                     for count, share in zip(counts, shares)]
            lines.append(f"{'human ' + name:<16}" + "".join(f"{cell:>18}" for cell in cells))
        lines.append("")
    return "\n".join(lines).rstrip()


def picture(results: dict[str, dict]) -> bytes:
    """Draws the confusion matrices, rows human and columns judge; returns a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(results), 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (subset, figures) in zip(figure.subplots(1, len(results), squeeze=False)[0],
                                       results.items()):
        shares = [[share or 0.0 for share in row] for row in figures["row_percent"]]
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
        for row, column in np.ndindex(3, 3):
            share = figures["row_percent"][row][column]
            axes.text(column, row, f"{figures['confusion'][row][column]}\n"
                      + ("-" if share is None else f"{share:.1f}%"), ha="center", va="center",
                      color="white" if shares[row][column] > 55 else "#1f2a44", fontsize=12)
        axes.set_xticks(range(3), LEVEL_NAMES)
        axes.set_yticks(range(3), LEVEL_NAMES, rotation=90, va="center")
        axes.set_xlabel("judge")
        axes.set_ylabel("human")
        axes.set_title(f"{subset}: {figures['agreed']} of {figures['total']} agree, "
                       f"kappa {figures['kappa']:.3f}", fontsize=11)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _line(value) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)
