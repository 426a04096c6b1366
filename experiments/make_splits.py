r"""Splits records as the paper does: test, validation, cold start and RL (2.2, 4.1).

    python -m experiments.make_splits --records_file=memcalib.jsonl --output_dir=data/splits
    python -m experiments.make_splits --records_file=train.jsonl --test_file=test.jsonl \
        --validation_ids=validation.txt --rl_ids=rl.txt --output_dir=data/splits

15,000 records become 13,500 to train on and 1,500 to test; of the former 1,500 are for validation,
and of the other 12,000, all for SFT, 4,000 for the cold start and 8,000 for RL. Each is drawn with
every domain's share from --seed, or named by a list of ids (arXiv 2609.24259).
"""

import collections
import hashlib
import json
import pathlib
from collections.abc import Sequence

from absl import flags

from experiments import common
from memcalib_jax.data import Record, load_records, split_by_ids, stratified_split
from memcalib_jax.data.jsonl import Oddities, read_objects
from memcalib_jax.data.near_identical import near_identical
from memcalib_jax.files import write_atomically, write_json

FLAGS = flags.FLAGS
FORMAT = "memcalib_jax.splits/1"

flags.DEFINE_string("records_file", None, "All records (JSONL), or those to train on if "
                    "--test_file is given.", required=True)
flags.DEFINE_string("test_file", None, "Test records, if they are apart already.")
flags.DEFINE_string("output_dir", None, "Folder for the splits and splits.json.", required=True)
# Drawn in this order, after all that have a list of ids.
_DRAWN = {"test": 1500, "validation": 1500, "cold_start": 4000, "rl": 8000}
for _name, _size in _DRAWN.items():
    flags.DEFINE_integer(f"num_{_name}", _size, f"Records of {_name}.jsonl, without a list of ids.",
                         lower_bound=0)
    flags.DEFINE_string(f"{_name}_ids", None, f"Text file with the ids of {_name}.jsonl, one a "
                        f"line, in place of --num_{_name} drawn ones.")
flags.DEFINE_integer("seed", 0, "Seed of what is drawn.", lower_bound=0)
flags.DEFINE_float("alike", 0.9, "Share of words in common from which on two questions are nearly "
                   "identical.", lower_bound=0.01, upper_bound=1)
flags.DEFINE_integer("max_near_identical", 0, "Most nearly identical questions of test or "
                     "validation and of what is trained on; with more, nothing is written.",
                     lower_bound=0)


def main():
    records = load_records(FLAGS.records_file)
    splits = draw(records, load_records(FLAGS.test_file) if FLAGS.test_file else None)
    pairs = leaks(splits)
    print(table(splits))
    if len(pairs) > FLAGS.max_near_identical:
        shown = "\n".join(f"  {pair['split']} {pair['held_out']!r} and {pair['train']!r}: "
                          f"{100 * pair['share']:.0f}%" for pair in pairs[:5])
        raise common.UsageError(
            f"{len(pairs)} questions of test or validation are nearly identical to one of training "
            f"(--alike={FLAGS.alike}):\n{shown}\nTake one of each pair out, or allow them with "
            f"--max_near_identical={len(pairs)}; nothing was written")
    write(splits, pairs, pathlib.Path(FLAGS.output_dir))


def draw(records: Sequence[Record], test: list[Record] | None) -> dict[str, list[Record]]:
    """Splits the records as the flags say; each split is in the order of its file.

    Raises:
      UsageError: test and training share an id, a list of ids will not do, or there are too few
        records.
    """
    names = [name for name in _DRAWN if test is None or name != "test"]
    if test is not None:
        shared = sorted({record.id for record in records} & {record.id for record in test})
        if shared or FLAGS.test_ids:
            raise common.UsageError(
                f"--records_file and --test_file share {len(shared)} ids: {', '.join(shared[:5])}"
                if shared else "--test_file and --test_ids both say what to test on: give one")
    lists = [name for name in names if FLAGS[f"{name}_ids"].value]
    splits, rest = {} if test is None else {"test": test}, list(records)
    for name in lists:
        rest, splits[name] = _listed(records, rest, name)
    for name in names:
        if name not in lists:
            rest, splits[name] = _drawn(rest, name)
    held_out = {record.id for name in ("test", "validation") for record in splits[name]}
    tested = {record.id for record in splits["test"]}
    return {"train": [record for record in records if record.id not in tested],
            "test": splits["test"], "validation": splits["validation"],
            "sft": [record for record in records if record.id not in held_out],
            "cold_start": splits["cold_start"], "rl": splits["rl"]}


def _listed(records, rest, name):
    try:
        _, listed = split_by_ids(records, FLAGS[f"{name}_ids"].value)
        taken = {record.id for record in listed} - {record.id for record in rest}
        if taken:
            raise ValueError(f"{len(taken)} ids are in an earlier list too: "
                             f"{', '.join(sorted(taken)[:5])}")
    except ValueError as error:
        raise common.UsageError(f"--{name}_ids: {error}") from None
    return split_by_ids(rest, [record.id for record in listed])


def _drawn(rest, name):
    size = FLAGS[f"num_{name}"].value
    if size > len(rest):
        raise common.UsageError(f"--num_{name}={size}: only {len(rest)} records are left for it; "
                                "lower it, or another size")
    return stratified_split(rest, size, seed=FLAGS.seed)


def leaks(splits: dict[str, list[Record]]) -> list[dict]:
    """Finds questions of test and validation that stand in training nearly word for word."""
    found = []
    for name, others in (("test", splits["train"]), ("validation", splits["sft"])):
        for held_out, train, share in near_identical(
                [record.question for record in splits[name]],
                [record.question for record in others], threshold=FLAGS.alike):
            found.append({"split": name, "held_out": splits[name][held_out].id,
                          "train": others[train].id, "share": share})
    return found


def table(splits: dict[str, list[Record]]) -> str:
    """Lays the splits' sizes out by domain."""
    domains = sorted({record.domain for split in splits.values() for record in split})
    lines = [f"{'':<12}" + "".join(f"{domain:>14}" for domain in (*domains, "all"))]
    for name, split in splits.items():
        counts = collections.Counter(record.domain for record in split)
        lines.append(f"{name:<12}" + "".join(f"{counts[domain]:>14}" for domain in domains)
                     + f"{len(split):>14}")
    return "\n".join(lines)


def write(splits: dict[str, list[Record]], pairs: list[dict], folder: pathlib.Path):
    """Writes each split, and last the manifest.

    Raises:
      UsageError: the folder holds splits that were made otherwise.
    """
    sources, lines = {}, {}
    for path in filter(None, (FLAGS.records_file, FLAGS.test_file)):
        digest = hashlib.sha256()
        for item in read_objects(path, Oddities(path)):
            line = json.dumps(item.value, ensure_ascii=False).encode() + b"\n"
            lines[item.value["id"]] = line
            digest.update(line)
        sources[path] = digest.hexdigest()
    files = {name: b"".join(lines[record.id] for record in split)
             for name, split in splits.items()}
    manifest = {
        "format": FORMAT, "seed": FLAGS.seed, "alike": FLAGS.alike, "sources": sources,
        "splits": {name: {
            "file": f"{name}.jsonl", "records": len(split),
            "by_domain": dict(sorted(collections.Counter(
                record.domain for record in split).items())),
            "from_ids": bool(name in _DRAWN and FLAGS[f"{name}_ids"].value),
            "sha256": hashlib.sha256(files[name]).hexdigest()} for name, split in splits.items()},
        "near_identical": pairs}
    _refuse_other(folder, manifest)
    for name, data in files.items():
        write_atomically(folder / f"{name}.jsonl", data)
    write_json(folder / "splits.json", manifest)
    print(f"\n{len(pairs)} nearly identical questions of test or validation and training; "
          f"the splits and splits.json are in {folder}")


def _refuse_other(folder, manifest):
    """Refuses to change files that a run may have been trained on."""
    path = folder / "splits.json"
    try:
        there = json.loads(path.read_text())["splits"] if path.exists() else None
    except (ValueError, TypeError, KeyError):
        there = {}
    if there is not None and there != manifest["splits"]:
        raise common.UsageError(f"--output_dir={folder} holds other splits (splits.json): choose "
                                "another folder, or move it away")


if __name__ == "__main__":
    common.run(main)
