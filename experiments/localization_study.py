r"""Has a person label sentences, and compares that with where credit went (4.4, I).

    python -m experiments.localization_study --study_dir=studies/first --run_dir=runs/first
    (fill in the second column of studies/first/sheet.csv: Irrelevant, Partial or Key)
    python -m experiments.localization_study --study_dir=studies/first

The annotator needs sheet.csv alone, which does not show the credit; key.json holds it. The second
command writes study.json and study.png (figure 3(h)), and one case of each group of channels, as in
figures 6 and 7.
"""

import dataclasses
import json
import pathlib

import numpy as np
from absl import flags

from experiments import common
from memcalib_jax.credit import CHANNELS
from memcalib_jax.evaluation import localization_figures
from memcalib_jax.evaluation import localization_study as study
from memcalib_jax.evaluation.trace import DamagedTrace, load_trace, trace_path, trace_steps
from memcalib_jax.files import write_atomically, write_json

FLAGS = flags.FLAGS

flags.DEFINE_string("study_dir", None, "Folder of the sheet and its key.", required=True)
flags.DEFINE_string("run_dir", None, "Folder of a training run, to draw a sheet from its traces; "
                    "without it the filled sheet in --study_dir is read.")
flags.DEFINE_integer("num_pairs", 20, "Pairs of response and channel drawn a channel.",
                     lower_bound=1)
flags.DEFINE_list("cases", [], "Pairs to draw as figures 6 and 7, by their numbers in the sheet; "
                  "default: of each group of channels the one with most credit on Key sentences.")
flags.DEFINE_integer("seed", 0, "Seed of the draw and of the bootstrap.", lower_bound=0)


def main():
    folder = pathlib.Path(FLAGS.study_dir)
    if FLAGS.run_dir:
        draw(folder)
    else:
        read(folder)


def draw(folder: pathlib.Path):
    """Writes the sheet and the key."""
    if (folder / "sheet.csv").exists():
        raise common.UsageError(f"{folder / 'sheet.csv'} is there already, and may be filled in; "
                                "choose another --study_dir")
    try:
        steps, missing = trace_steps(FLAGS.run_dir)
        candidates = []
        for step in steps:
            trace = load_trace(trace_path(FLAGS.run_dir, step))
            candidates += [
                (step, int(trace.pair_response_S[pair]), int(trace.pair_channel_S[pair]))
                for pair in np.flatnonzero(trace.localized_S)]
        chosen = study.draw(candidates, FLAGS.num_pairs, seed=FLAGS.seed)
        found = {}
        for step in sorted({step for step, _, _ in chosen}):
            trace = load_trace(trace_path(FLAGS.run_dir, step))
            found |= {one: study.pair_of(trace, *one[1:]) for one in chosen if one[0] == step}
    except DamagedTrace as error:
        raise common.UsageError(str(error)) from None
    if not chosen:
        raise common.UsageError(f"{FLAGS.run_dir}: no credit was moved in any step, so that there "
                                "is nothing to label")
    pairs = [found[one] for one in chosen]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "key.json", [dataclasses.asdict(pair) for pair in pairs])
    # The mark makes spreadsheets read UTF-8.
    write_atomically(folder / "sheet.csv", study.sheet(pairs).encode("utf-8-sig", "replace"))
    if missing:
        print(f"{len(missing)} steps have no trace and are left out")
    for channel in (*study.SUPPORT, *study.UNDER_USE):
        count = sum(pair.channel == channel for pair in pairs)
        if count < FLAGS.num_pairs:
            print(f"{CHANNELS[channel]} has {count} pairs with moved credit, not "
                  f"{FLAGS.num_pairs}; all are in the sheet")
    sentences = sum(len(pair.sentences) for pair in pairs)
    print(f"{sentences} sentences of {len(pairs)} pairs are in {folder / 'sheet.csv'}. Have its "
          f"second column filled in with {', '.join(study.LABELS)} or their first letters, keep "
          f"{folder / 'key.json'} from the annotator, and start this program again without "
          "--run_dir")


def read(folder: pathlib.Path):
    """Compares the filled sheet with the credit."""
    try:
        text, key = ((folder / name).read_text("utf-8") for name in ("sheet.csv", "key.json"))
    except OSError as error:
        raise common.UsageError(f"{error.filename} cannot be read ({error.strerror}): draw a sheet "
                                "with --run_dir first") from None
    try:
        pairs = [pair_from_json(item) for item in json.loads(key)]
    except (ValueError, TypeError, KeyError):
        raise common.UsageError(
            f"{folder / 'key.json'} has been changed; draw a new sheet") from None
    try:
        labelled = study.read_sheet(text, pairs)
    except ValueError as error:
        raise common.UsageError(f"{folder / 'sheet.csv'}: {error}") from None
    cases = chosen_cases(labelled)
    results = study.study(labelled, seed=FLAGS.seed)
    write_json(folder / "study.json", results)
    write_atomically(folder / "study.png", localization_figures.share_picture(results))
    for number in cases:
        write_atomically(folder / f"case_{number}.png",
                         localization_figures.case_picture(labelled[number - 1], number))
    names = ", ".join(f"case_{number}.png" for number in cases)
    print(f"{study.table(results)}\n\nstudy.json, study.png, {names} are in {folder}")


def pair_from_json(item: dict) -> study.Pair:
    """Returns a pair of the key."""
    sentences = tuple(study.Sentence(**sentence) for sentence in item.pop("sentences"))
    return study.Pair(**item | {"memories": tuple(item["memories"])}, sentences=sentences)


def chosen_cases(labelled: list[study.LabelledPair]) -> list[int]:
    """Returns the numbers of --cases, or of each group's pair with most credit on Key."""
    if FLAGS.cases:
        wrong = [number for number in FLAGS.cases
                 if not number.isdigit() or not 1 <= int(number) <= len(labelled)]
        if wrong:
            raise common.UsageError(f"--cases: {wrong[0]!r} is no pair of the sheet; they are "
                                    f"numbered from 1 to {len(labelled)}")
        return [int(number) for number in FLAGS.cases]
    on_key = [study.shares(one)[1][-1] for one in labelled]
    return [max(group, key=on_key.__getitem__) + 1
            for channels in (study.SUPPORT, study.UNDER_USE)
            if (group := [place for place, one in enumerate(labelled)
                          if one.pair.channel in channels])]


if __name__ == "__main__":
    common.run(main)
