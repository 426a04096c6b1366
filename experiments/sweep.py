r"""Trains and evaluates once for each value of a setting, and shows what came out (H.1, H.2).

    python -m experiments.sweep --sweep_dir=runs/eta --vary=eta --values="0;0.25;0.5;0.75;1" \
        --both="--model_path=/models/Qwen3-8B --judge_url=http://127.0.0.1:8000/v1 \
                --judge_model=my-judge" \
        --train="--flagfile=experiments/presets/qwen3_8b.flags --train_file=rl.jsonl" \
        --evaluate="--eval_file=test.jsonl"

Several settings vary together with --vary=granularity,mode --values="sentence,absolute;token,
ordered". The same command resumes; a value that is done is not done again, and more values may be
added. Each value's runs are in a folder of its name; sweep.json and sweep.png show them all.
"""

import json
import pathlib
import re
import shlex
import subprocess
import sys

from absl import flags

from experiments import common
from memcalib_jax.evaluation import sweep
from memcalib_jax.evaluation.report import load_results
from memcalib_jax.evaluation.tables import check_comparable
from memcalib_jax.files import write_atomically, write_json

FLAGS = flags.FLAGS

flags.DEFINE_string("sweep_dir", None, "Folder of the sweep.", required=True)
flags.DEFINE_list("vary", None, "The training flag to vary, or several with commas.",
                  required=True)
flags.DEFINE_string("values", None, "Its values with semicolons; where several flags vary, each "
                    "value lists theirs with commas.", required=True)
flags.DEFINE_string("both", None, "Flags of train_rl and evaluate both: model and judge.")
flags.DEFINE_string("train", None, "Flags of train_rl.")
flags.DEFINE_string("evaluate", None, "Flags of evaluate.")
flags.DEFINE_bool("best", False, "Evaluate the best checkpoint by validation, in place of the "
                  "newest.")
flags.DEFINE_bool("dry_run", False, "Print the commands, and stop.")


def main():
    folder = pathlib.Path(FLAGS.sweep_dir)
    points = {label: commands(settings, folder / _folder_name(settings))
              for label, settings in _points().items()}
    if FLAGS.dry_run:
        print("\n".join(shlex.join(command) for pair in points.values() for command in pair))
        return
    common.claim_run_dir(folder, {"vary": FLAGS.vary}, may_change=())
    waiting = {label: pair for label, pair in points.items() if not _is_done(pair)}
    if len(waiting) > 1:
        # A value that the training refuses is found before the first one takes hours.
        for train, _ in waiting.values():
            _run([*train, "--dry_run"], quiet=True)
    for place, (label, (train, evaluate)) in enumerate(waiting.items(), start=1):
        print(f"[{place}/{len(waiting)}] {','.join(FLAGS.vary)} = {label}", flush=True)
        _run(train)
        _run(evaluate)
        write_json(_folder(evaluate) / "commands.json", [train, evaluate])
    show(folder, {label: _folder(evaluate) for label, (_, evaluate) in points.items()})


def _points() -> dict[str, dict[str, str]]:
    """Returns the flags of each value, by its label.

    Raises:
      UsageError: a value has too few or too many parts, is repeated, or a flag is set twice.
    """
    points = {}
    for value in FLAGS.values.split(";"):
        label = value.strip()
        # A single flag's value may hold commas itself, such as nine etas.
        parts = [label] if len(FLAGS.vary) == 1 else [part.strip() for part in label.split(",")]
        if len(parts) != len(FLAGS.vary) or not all(parts):
            raise common.UsageError(f"--values: {value!r} is not one value for each of "
                                    f"--vary={','.join(FLAGS.vary)}")
        if label in points:
            raise common.UsageError(f"--values: {label!r} is given twice")
        points[label] = dict(zip(FLAGS.vary, parts))
    names = [_folder_name(settings) for settings in points.values()]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise common.UsageError(f"--values: two would share the folder {repeated!r}")
    for option in ("both", "train", "evaluate"):
        for argument in _split(option):
            name = argument.lstrip("-").split("=")[0]
            if name in (*FLAGS.vary, "run_dir", "checkpoint", "dry_run"):
                raise common.UsageError(f"--{option}: the sweep itself sets --{name}")
    return points


def commands(settings: dict[str, str], folder: pathlib.Path) -> tuple[list[str], list[str]]:
    """Returns the commands that train and evaluate with these settings."""
    run_dir = folder / "train"
    chosen = [f"--{name}={value}" for name, value in settings.items()]
    return (
        [sys.executable, "-m", "experiments.train_rl", *_split("both"), *_split("train"), *chosen,
         f"--run_dir={run_dir}"],
        [sys.executable, "-m", "experiments.evaluate", *_split("both"), *_split("evaluate"),
         f"--checkpoint={run_dir / 'best' if FLAGS.best else run_dir}",
         f"--run_dir={folder / 'evaluation'}"])


def _split(option):
    try:
        return shlex.split(FLAGS[option].value or "")
    except ValueError as error:
        raise common.UsageError(f"--{option}: {error}") from None


def _folder_name(settings):
    return re.sub(r"[^\w.+-]", "_", "_".join(f"{name}_{value}"
                                            for name, value in settings.items()))


def _folder(evaluate) -> pathlib.Path:
    return pathlib.Path(evaluate[-1].removeprefix("--run_dir=")).parent


def _is_done(pair) -> bool:
    """Says whether these very commands have ended well before."""
    path = _folder(pair[1]) / "commands.json"
    try:
        return json.loads(path.read_text()) == list(pair)
    except (OSError, ValueError):
        return False


def _run(command, *, quiet=False):
    """Runs a command to its end.

    Raises:
      UsageError: it fails; its own message is on the console already.
    """
    status = subprocess.run(command, stdout=subprocess.DEVNULL if quiet else None).returncode
    if status in (130, -2):
        raise KeyboardInterrupt
    if status:
        raise common.UsageError(f"this ended with status {status}:\n  {shlex.join(command)}\nMend "
                                "what it says above, then start the same command again")


def show(folder: pathlib.Path, runs: dict[str, pathlib.Path]):
    """Writes sweep.json and sweep.png, and prints the table.

    Raises:
      UsageError: the values' evaluations are not comparable.
    """
    name = ", ".join(FLAGS.vary)
    try:
        results = {label: load_results(path / "evaluation") for label, path in runs.items()}
        check_comparable(results)
    except ValueError as error:
        raise common.UsageError(str(error)) from None
    write_json(folder / "sweep.json", {
        "vary": FLAGS.vary, "best": FLAGS.best,
        "note": next((result["note"] for result in results.values() if result["note"]), None),
        "points": [{"value": label, "evaluation": str(runs[label] / "evaluation"),
                    "mean": result["overall"]["mean"], "std": result["overall"]["std"]}
                   for label, result in results.items()]})
    write_atomically(folder / "sweep.png", sweep.picture(name, results))
    print(f"\n{sweep.table(name, results)}\n\nsweep.json, sweep.png and a folder a value are in "
          f"{folder}")


if __name__ == "__main__":
    common.run(main)
