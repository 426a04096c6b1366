"""Sheets for annotators: CSV that survives a spreadsheet, and answers by row read back from it."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence


def to_csv(rows: Iterable[Sequence]) -> str:
    """Returns rows as CSV, the first of them the column names."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def cell(text: str) -> str:
    """Keeps a spreadsheet from taking a text, such as a list, for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def from_csv(text: str, columns: Sequence[str], what: str) -> list[dict]:
    """Reads lines as dicts by column name; `what` names the sheet in messages.

    Raises:
      ValueError: a column is missing.
    """
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""),
                            restval="")
    absent = [name for name in columns if name not in (reader.fieldnames or ())]
    if absent:
        raise ValueError(f"{what} has no column {absent[0]!r}; save it as CSV with commas, with "
                         "the first line as it was")
    # A spreadsheet may leave lines of nothing but commas at the end.
    return [line for line in reader if any(line[name] for name in columns)]


def read_answers(text: str, column: str, rows: Sequence[str], answers: Mapping[str, object],
                 kind: str, allowed: Sequence[str]) -> dict[str, object]:
    """Reads what the annotator wrote in `column` of each row.

    Args:
      text: the filled sheet, with a column `row`.
      column: where the answers are.
      rows: names of the rows that the sheet must have, each once.
      answers: what an answer in lower case means.
      kind, allowed: what an answer is called and which there are, for messages.

    Returns:
      The meaning of each row's answer, in the order of `rows`.

    Raises:
      ValueError: a row is missing, repeated, unknown or not filled in, or an answer is none; says
        which rows.
    """
    found: dict[str, str] = {}
    for line in from_csv(text, ("row", column), "the sheet"):
        if line["row"] in found:
            raise ValueError(f"the sheet has row {line['row']} twice")
        found[line["row"]] = line[column].strip().lower()
    known = set(rows)
    for wrong, problem in (
            ([row for row in found if row not in known], "that the key does not have"),
            ([row for row in rows if row not in found], "missing"),
            ([row for row in rows if found.get(row) == ""], f"without a {kind}"),
            ([row for row in rows if found.get(row) and found[row] not in answers],
             f"with a {kind} that is none of {', '.join(allowed)}")):
        if wrong:
            raise ValueError(f"the sheet has {len(wrong)} rows {problem}: {', '.join(wrong[:10])}"
                             + (", ..." if len(wrong) > 10 else ""))
    return {row: answers[found[row]] for row in rows}
