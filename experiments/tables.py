r"""Makes a table of the paper from evaluations on disk, as Markdown and LaTeX.

    python -m experiments.tables --table=1 --runs=SmolLM2=runs/smollm2,GPT=runs/gpt
    python -m experiments.tables --table=2 \
        --runs="Qwen3-8B/GDPO=runs/gdpo,Qwen3-8B/MemCalib-RL=runs/memcalib"
    python -m experiments.tables --table=10 --runs=Cold-start=runs/cold,MemCalib-RL=runs/memcalib
    python -m experiments.tables --table=14 --rejudged=runs/rejudged

Tables 1, 3 and 12 have a row a run, in the order given; 2 and 9 (labels MODEL/METHOD) also mark
within each model; 10 compares two; 13 and 14 are made from a folder of experiments.rejudge.
Results of different test sets or judges are refused.
"""

import json
import pathlib

from absl import flags

from experiments import common
from memcalib_jax.evaluation import tables
from memcalib_jax.evaluation.report import load_results
from memcalib_jax.files import write_atomically

FLAGS = flags.FLAGS

flags.DEFINE_enum("table", None, [str(number) for number in tables.CAPTIONS],
                  "Number of the paper's table.", required=True)
flags.DEFINE_list("runs", None, "LABEL=FOLDER of finished evaluations, with commas.")
flags.DEFINE_string("rejudged", None, "Folder of experiments.rejudge, for tables 13 and 14.")
flags.DEFINE_string("output_dir", None, "Folder for table_<n>.md and table_<n>.tex; default: both "
                    "are only printed.")


def main():
    number = int(FLAGS.table)
    wanted, other = ("rejudged", "runs") if number in (13, 14) else ("runs", "rejudged")
    if not FLAGS[wanted].value or FLAGS[other].value:
        raise common.UsageError(f"table {number} is made from --{wanted}, and not --{other}")
    try:
        table = make(number)
    except ValueError as error:
        raise common.UsageError(str(error)) from None
    layouts = {"md": tables.markdown(table), "tex": tables.latex(table)}
    print("\n".join(layouts.values()), end="")
    if FLAGS.output_dir:
        for ending, text in layouts.items():
            path = pathlib.Path(FLAGS.output_dir) / f"table_{number}.{ending}"
            write_atomically(path, text.encode())
            print(f"written: {path}")


def make(number: int) -> tables.Table:
    """Makes the table of the flags.

    Raises:
      ValueError: results cannot be read, or do not belong in one table.
    """
    if number == 14:
        return tables.agreement_table(_comparison())
    if number == 13:
        folder = pathlib.Path(FLAGS.rejudged)
        return tables.metric_table(13, {
            name: load_results(folder / name) for name in _comparison()["atoms"]})
    runs = _runs()
    if number == 10:
        return tables.channel_table(runs)
    if number in (2, 9):
        return (tables.main_table if number == 2 else tables.complete_table)(_grouped(runs))
    return tables.metric_table(number, runs)


def _runs() -> dict[str, dict]:
    runs = {}
    for entry in FLAGS.runs:
        # A label may hold an equals sign, such as eta=0.5.
        label, _, folder = entry.rpartition("=")
        if not label.strip() or not folder.strip():
            raise ValueError(f"--runs: {entry!r} is no LABEL=FOLDER")
        if label in runs:
            raise ValueError(f"--runs: two runs are called {label!r}")
        runs[label] = load_results(folder)
    return runs


def _grouped(runs):
    groups = {}
    for label, results in runs.items():
        model, slash, method = label.partition("/")
        if not (model and slash and method):
            raise ValueError(f"--runs: table {FLAGS.table} needs labels MODEL/METHOD, not "
                             f"{label!r}")
        groups.setdefault(model, {})[method] = results
    return groups


def _comparison() -> dict:
    path = pathlib.Path(FLAGS.rejudged) / "rejudge.json"
    try:
        comparison = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give the --run_dir of an "
                         "experiments.rejudge that has ended") from None
    except ValueError:
        comparison = None
    if not isinstance(comparison, dict) or not comparison.keys() >= {"judges", "atoms", "metrics"}:
        raise ValueError(f"{path}: not what experiments.rejudge writes")
    return comparison


if __name__ == "__main__":
    common.run(main)
