"""How far can the lexical stand-in be trusted? Its agreement with careful readers' levels.

    python -m benchmarks.lexical_judge

Every atom of the sample's 144 labelled responses is one item. The rule's constants and word lists
were chosen on one half of the records (`fitted`); `held out` is the other half. The last three
rows choose the constants anew on two domains and apply them to the third. The last line is JSON.
"""

import itertools
import json
import random
from collections import defaultdict

import numpy as np

from memcalib_jax.data import Record, load_records, load_responses, sample_path
from memcalib_jax.evaluation.agreement import accuracy, cohen_kappa, confusion
from memcalib_jax.judge.lexical import LexicalRule, lexical_levels

SPLIT_SEED = 0
RULES = tuple(
    LexicalRule(used, carried, early)
    for used, carried, early in itertools.product(
        (0.25, 0.3, 1 / 3, 0.4), (0.2, 0.3, 0.4), (0.4, 0.5, 0.6, 0.7)
    )
)


def fitted_ids(records: list[Record], seed: int = SPLIT_SEED) -> set[str]:
    """Draws half of each domain's records: those on which the rule was chosen."""
    ids_by_domain = defaultdict(list)
    for record in records:
        ids_by_domain[record.domain].append(record.id)
    chosen = set()
    for domain, ids in ids_by_domain.items():
        ids.sort()
        random.Random(f"{seed}/{domain}").shuffle(ids)
        chosen.update(ids[: len(ids) // 2])
    return chosen


def sample_confusion(records, responses, rule: LexicalRule = LexicalRule()) -> np.ndarray:
    """Counts [reader's level, stand-in's level] over the atoms of the records' responses."""
    record_by_id = {record.id: record for record in records}
    read, predicted = [], []
    for item in responses:
        record = record_by_id.get(item.record_id)
        if record is None:
            continue
        predicted += lexical_levels(
            record.question,
            [block.fluent_text for block in record.blocks],
            [atom.text for atom in record.atoms],
            item.text,
            rule,
        )
        read += [item.levels[atom.id] for atom in record.atoms]
    return confusion(read, predicted, 3)


def summary(counts: np.ndarray) -> dict:
    """Gives the three figures of a confusion: shares in [0, 1], and kappa."""
    used = np.add.reduceat(np.add.reduceat(counts, [0, 1], axis=0), [0, 1], axis=1)
    return {
        "items": int(counts.sum()),
        "accuracy": round(accuracy(counts), 4),
        "ignore_or_used": round(accuracy(used), 4),
        "kappa": round(cohen_kappa(counts), 4),
    }


def main() -> None:
    records = load_records(sample_path("records.jsonl"))
    responses = load_responses(sample_path("responses.jsonl"))
    fitted = fitted_ids(records)
    parts = {
        "fitted": [record for record in records if record.id in fitted],
        "held out": [record for record in records if record.id not in fitted],
        "all": records,
    }
    tables = {name: sample_confusion(part, responses) for name, part in parts.items()}
    for domain in sorted({record.domain for record in records}):
        inside = [record for record in records if record.domain != domain]
        outside = [record for record in records if record.domain == domain]
        rule = max(RULES, key=lambda rule: cohen_kappa(sample_confusion(inside, responses, rule)))
        tables[f"without {domain}"] = sample_confusion(outside, responses, rule)

    print(f"{'records':<22}{'items':>7}{'accuracy':>10}{'ignore/used':>13}{'kappa':>8}")
    figures = {name: summary(counts) for name, counts in tables.items()}
    for name, row in figures.items():
        print(
            f"{name:<22}{row['items']:>7}{row['accuracy']:>10.3f}"
            f"{row['ignore_or_used']:>13.3f}{row['kappa']:>8.3f}"
        )
    print("\nheld out: readers' levels in rows, the stand-in's in columns")
    print(f"{'':<10}{'Ignore':>8}{'Bound':>8}{'Control':>8}")
    for name, row in zip(("Ignore", "Bound", "Control"), tables["held out"], strict=True):
        print(f"{name:<10}" + "".join(f"{value:>8}" for value in row))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
