"""Pilot rounds: small fresh batches that people read, until the pipeline may be frozen (B.1)."""

import hashlib
import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memcalib_jax.construction.pipeline import STAGES
from memcalib_jax.data.records import DOMAINS
from memcalib_jax.sheets import cell, from_csv, read_answers, to_csv

PASS_RATE = 0.9
"""Share of a batch that must pass, all aspects, before the pipeline is frozen."""

PASSES_COLUMN = "passes (yes, no)"
STAGE_COLUMN = f"stage of the issue ({', '.join(STAGES)})"
ISSUE_COLUMN = "issue"

_ANSWERS = {"yes": True, "y": True, "no": False, "n": False}


@dataclass(frozen=True)
class Outcome:
    """What people found in a batch: how many samples pass, and the issues of the others.

    Attributes:
      issues: (sample id, stage, what is wrong) of each sample that does not pass.
    """

    passed: int
    total: int
    issues: tuple[tuple[str, str, str], ...]

    @property
    def pass_rate(self) -> float:
        """Share of samples in which nobody found an issue."""
        return self.passed / self.total

    @property
    def by_stage(self) -> dict[str, int]:
        """Number of issues by stage, the most first."""
        return dict(Counter(stage for _, stage, _ in self.issues).most_common())


def quotas(size: int) -> dict[str, int]:
    """Shares a batch out among the domains: 50 are 17 health, 17 general and 16 coding."""
    order = sorted(DOMAINS, reverse=True)
    return {domain: (size + len(order) - 1 - place) // len(order)
            for place, domain in enumerate(order)}


def fresh_order(ids: Sequence[str], seed: int) -> list[str]:
    """Orders ids by chance, the same way in every round."""
    return sorted(ids, key=lambda id: hashlib.sha256(f"{seed}/pilot/{id}".encode()).digest())


def review_sheet(samples: Sequence[Mapping]) -> str:
    """Makes the CSV sheet that people fill in, a row a sample."""
    columns = ["row", "sample_id", "domain", PASSES_COLUMN, STAGE_COLUMN, ISSUE_COLUMN, "query"]
    return to_csv([columns, *([number, cell(sample["id"]), sample["domain"], "", "", "",
                               cell(sample["query"])]
                              for number, sample in enumerate(samples, start=1))])


def is_filled(text: str) -> bool:
    """Says whether somebody has begun to fill a sheet in."""
    return any(line[PASSES_COLUMN].strip() for line in from_csv(text, (PASSES_COLUMN,),
                                                                "the sheet"))


def read_sheet(text: str, samples: Sequence[Mapping]) -> Outcome:
    """Reads a filled sheet.

    Raises:
      ValueError: a row is missing, repeated, unknown or without an answer, or one that does not
        pass has no stage; says which rows.
    """
    rows = [str(number) for number in range(1, len(samples) + 1)]
    passes = read_answers(text, PASSES_COLUMN, rows, _ANSWERS, "verdict", ("yes", "no"))
    lines = {line["row"]: line for line in
             from_csv(text, ("row", STAGE_COLUMN, ISSUE_COLUMN), "the sheet")}
    issues, wrong = [], []
    for row, sample in zip(rows, samples, strict=True):
        if passes[row]:
            continue
        stage = lines[row][STAGE_COLUMN].strip().lower()
        if stage not in STAGES:
            wrong.append(row)
        issues.append((sample["id"], stage, lines[row][ISSUE_COLUMN].strip()))
    if wrong:
        raise ValueError(f"the sheet has {len(wrong)} rows that do not pass and name no stage "
                         f"({', '.join(STAGES)}): {', '.join(wrong[:10])}")
    return Outcome(sum(passes.values()), len(samples), tuple(issues))


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c1c1c; background: #fff }
article { border-top: 3px solid #444; margin-top: 3rem }
h2 { font-size: 1.2rem } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem }
blockquote { margin: .5rem 0; padding: .3rem .8rem; border-left: 4px solid #bbb; color: #333 }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top;
  border-top: 1px solid #ccc; padding: .3rem .5rem }
.A { background: #f1f1f1 } .B { background: #e3eefc } .C { background: #fdeedd }
details { color: #333 } dt { font-weight: 600 } dd { margin: 0 0 .4rem 1rem }
"""


def review_page(samples: Sequence[Mapping], title: str) -> str:
    """Makes an HTML page to read the samples on: source, query, blocks, atoms and rubrics."""
    articles = "".join(_article(number, sample) for number, sample in enumerate(samples, start=1))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>
<body><h1>{html.escape(title)}</h1>
<p>Read each sample whole, and write into sheet.csv whether it passes: only if nothing is wrong with
its query and memories, its levels and its rubrics. For one that does not, name the stage where the
fault arose, and the fault. Levels: A the answer reads as if the statement were unknown, B it shapes
a detail, C a main conclusion rests on it.</p>
{articles}</body></html>
"""


def _article(number, sample):
    e = html.escape
    by_id = dict(zip((atom_id for block in sample["blocks"] for atom_id in block["atom_ids"]),
                     sample["atoms"]))
    blocks = "".join(
        f"<h3>Memory {e(block['id'])}</h3><blockquote>{e(block['text'])}</blockquote>"
        "<table><tr><th>Level</th><th>Statement</th><th>From</th><th>Rubric</th></tr>"
        + "".join(_row(by_id[atom_id]) for atom_id in block["atom_ids"]) + "</table>"
        for block in sample["blocks"])
    passages = "".join(f"<li>{e(passage['text'])}</li>" for passage in sample["passages"])
    return (f'<article id="{number}"><h2>{number}. {e(sample["id"])} ({e(sample["domain"])})</h2>'
            f"<h3>Query</h3><p><strong>{e(sample['query'])}</strong></p>{blocks}"
            f"<details><summary>Source and passages</summary><h3>Context</h3><p>"
            f"{e(sample['context'])}</p><h3>Question</h3><p>{e(sample['question'])}</p>"
            f"<h3>Reference answer</h3><p>{e(sample['reference_answer'])}</p>"
            f"<h3>Passages</h3><ul>{passages}</ul></details></article>\n")


def _row(atom):
    e = html.escape
    facts = "".join(
        f"<dt>{e(name.replace('_', ' '))}</dt><dd>"
        f"{e(value if isinstance(value, str) else '; '.join(value))}</dd>"
        for name, value in atom["rubric"].items())
    return (f'<tr class="{atom["level"]}"><td>{atom["level"]} {e(atom["action"])}</td>'
            f"<td>{e(atom['text'])}</td><td>{e(atom['origin'])}</td>"
            f"<td><details><summary>rubric</summary><dl>{facts}</dl></details></td></tr>")
