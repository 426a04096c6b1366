r"""Has a person check a judge: draws a sheet, and compares it once it is filled in (C).

    python -m experiments.audit_judge --audit_dir=audits/base --evaluation=runs/base
    (fill in the second column of audits/base/sheet.csv: A, B or C)
    python -m experiments.audit_judge --audit_dir=audits/base

The annotator needs sheet.csv alone, which shows neither the judge's level nor the ideal one;
key.csv holds them. The second command writes agreement.json and agreement.png.
"""

import pathlib

from absl import flags

from experiments import common
from experiments.saved import read_evaluation
from memcalib_jax.evaluation import audit
from memcalib_jax.evaluation.agreement import reader_agreement
from memcalib_jax.files import write_atomically, write_json

FLAGS = flags.FLAGS

flags.DEFINE_string("audit_dir", None, "Folder of the sheet and its key.", required=True)
flags.DEFINE_string("evaluation", None, "Folder of an evaluation, to draw a sheet from; without "
                    "it the filled sheet in --audit_dir is compared.")
flags.DEFINE_string("eval_file", None, "The evaluation's records, if they are not where its "
                    "settings say.")
flags.DEFINE_integer("num_random", 150, "Pairs drawn from all.", lower_bound=0)
flags.DEFINE_integer("num_stratified", 150, "Pairs drawn evenly over the nine combinations of "
                     "ideal and judged level.", lower_bound=0)
flags.DEFINE_integer("seed", 0, "Seed of the draw.", lower_bound=0)


def main():
    folder = pathlib.Path(FLAGS.audit_dir)
    if FLAGS.evaluation:
        draw(folder)
    else:
        compare(folder)


def draw(folder: pathlib.Path):
    """Writes the sheet and the key."""
    if (folder / "sheet.csv").exists():
        raise common.UsageError(f"{folder / 'sheet.csv'} is there already, and may be filled in; "
                                "choose another --audit_dir")
    evaluation = read_evaluation(FLAGS.evaluation, FLAGS.eval_file)
    pairs = [audit.Pair(seed, record.id, atom.id, atom.ideal, level)
             for seed, judgments in enumerate(evaluation.judgments)
             for record, judgment in zip(evaluation.records, judgments, strict=True)
             if judgment.valid
             for atom, level in zip(record.atoms, judgment.levels, strict=True)]
    try:
        chosen = audit.draw_audit(pairs, FLAGS.num_random, FLAGS.num_stratified, seed=FLAGS.seed)
    except ValueError as error:
        raise common.UsageError(f"{error}: lower --num_random or --num_stratified") from None
    if not chosen:
        raise common.UsageError("--num_random and --num_stratified are both 0")
    texts = {(seed, record.id): text for seed, row in enumerate(evaluation.texts)
             for record, text in zip(evaluation.records, row, strict=True)}
    sheet, key = audit.sheet_and_key(
        chosen, {record.id: record for record in evaluation.records}, texts)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "key.csv", key.encode())
    # The mark makes spreadsheets read UTF-8.
    write_atomically(folder / "sheet.csv", sheet.encode("utf-8-sig", "replace"))
    print(f"{len(chosen)} of {len(pairs)} judged pairs are in {folder / 'sheet.csv'}. Have its "
          f"second column filled in with A, B or C, keep {folder / 'key.csv'} from the annotator, "
          "and start this program again without --evaluation")


def compare(folder: pathlib.Path):
    """Compares the filled sheet with the key."""
    try:
        sheet, key = ((folder / name).read_text("utf-8") for name in ("sheet.csv", "key.csv"))
        levels = audit.read_audit(sheet, key)
    except OSError as error:
        raise common.UsageError(f"{error.filename} cannot be read ({error.strerror}): draw a sheet "
                                "with --evaluation first") from None
    except ValueError as error:
        raise common.UsageError(f"{folder}: {error}") from None
    results = {subset: reader_agreement(human, judge, len(audit.LEVEL_NAMES))
               for subset, (human, judge) in levels.items()}
    write_json(folder / "agreement.json", results)
    write_atomically(folder / "agreement.png", audit.picture(results))
    print(f"{audit.table(results)}\n\nagreement.json and agreement.png are in {folder}")


if __name__ == "__main__":
    common.run(main)
