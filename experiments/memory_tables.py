r"""Lays finished memory evaluations and trainings side by side: tables, and Memory-R2's figures.

    python -m experiments.memory_tables --output_dir=runs/memory_report \
        --runs=untrained=runs/memory_untrained,trained=runs/memory_test \
        --trainings=curriculum=runs/memory

--runs names folders of experiments.evaluate_memory, --trainings those of experiments.train_memory,
and --sweep evaluations by the value of a setting that differs, such as 0.1=DIR,0.3=DIR. Writes
memory.md, scores.png (figure 2), training.png (11), cost.png (12) and sweep.png (4).
"""

import pathlib

from absl import flags

from experiments import common
from memcalib_jax.evaluation import memory_figures
from memcalib_jax.evaluation.memory_report import comparison_tables, load_memory_results
from memcalib_jax.files import write_atomically
from memcalib_jax.jsonlines import read_rows

FLAGS = flags.FLAGS

flags.DEFINE_list("runs", [], "Evaluations, NAME=DIR.")
flags.DEFINE_list("trainings", [], "Training runs, NAME=DIR.")
flags.DEFINE_list("sweep", [], "Evaluations by a setting's value, VALUE=DIR.")
flags.DEFINE_string("output_dir", None, "Folder to write to.", required=True)


def named(flag: str) -> dict[str, pathlib.Path]:
    """Returns the folders of a flag by name.

    Raises:
      UsageError: a part has no name or folder, or a name is repeated.
    """
    folders = {}
    for part in FLAGS[flag].value:
        name, equals, folder = part.partition("=")
        if not (name and equals and folder) or name in folders:
            raise common.UsageError(f"--{flag}: {part!r} must be NAME=DIR, each name once")
        folders[name] = pathlib.Path(folder)
    return folders


def evaluations(flag: str) -> dict[str, dict]:
    """Returns the results of the evaluations of a flag.

    Raises:
      UsageError: a folder holds none.
    """
    try:
        return {name: load_memory_results(folder) for name, folder in named(flag).items()}
    except ValueError as error:
        raise common.UsageError(f"--{flag}: {error}") from None


def stages_of(folder: pathlib.Path) -> list[list[dict]]:
    """Returns the metrics of each stage of a training.

    Raises:
      UsageError: there are none.
      DamagedFile: a line of them is no JSON object.
    """
    paths = sorted(folder.glob("stage_*/metrics.jsonl"),
                   key=lambda path: int(path.parent.name.removeprefix("stage_")))
    if not paths:
        raise common.UsageError(f"--trainings: {folder} holds no stage with metrics: give the "
                                "--run_dir of experiments.train_memory")
    return [read_rows(path) for path in paths]


def main():
    runs = evaluations("runs")
    trainings = {name: stages_of(folder) for name, folder in named("trainings").items()}
    sweep = evaluations("sweep")
    if not (runs or trainings or sweep):
        raise common.UsageError("nothing to show: give --runs, --trainings or --sweep")
    try:
        by_value = {float(value): results for value, results in sweep.items()}
    except ValueError:
        raise common.UsageError(f"--sweep={','.join(FLAGS.sweep)}: what stands before = must be "
                                "the setting's value, a number") from None
    folder, written = pathlib.Path(FLAGS.output_dir), []

    def write(name: str, data: bytes):
        write_atomically(folder / name, data)
        written.append(name)

    if runs:
        try:
            tables = comparison_tables(runs)
        except ValueError as error:
            raise common.UsageError(f"--runs: {error}") from None
        print(tables)
        write("memory.md", tables.encode())
        write("scores.png", memory_figures.scores_picture(runs))
        write("cost.png", memory_figures.cost_picture(runs))
    if trainings:
        write("training.png", memory_figures.training_picture(trainings, runs))
    if by_value:
        write("sweep.png", memory_figures.sweep_picture(by_value))
    print(f"{', '.join(written)} are in {folder}")


if __name__ == "__main__":
    common.run(main)
