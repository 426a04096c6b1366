r"""Draws how credit assignment moved over a training run, from its traces alone (4.4, D.4, J).

    python -m experiments.dynamics --run_dir=runs/first

Writes to the run's dynamics/: figure_3bc.png, figure_3de.png and figure_3fg.png, their numbers by
step as steps.csv and by thirds of training as thirds.csv. Figure 3(a) is experiments.sweep's.
"""

import csv
import io
import pathlib
import sys

from absl import flags

from experiments import common
from memcalib_jax.evaluation import dynamics, dynamics_figures
from memcalib_jax.evaluation.trace import DamagedTrace, load_trace, trace_path, trace_steps
from memcalib_jax.files import write_atomically

FLAGS = flags.FLAGS

flags.DEFINE_string("run_dir", None, "Folder of a training run.", required=True)
flags.DEFINE_integer("sentence_responses", 0, "Find sentences in so many responses of a step, "
                     "spread evenly, which takes less time; 0: in all with moved credit.",
                     lower_bound=0)


def main():
    run_dir = pathlib.Path(FLAGS.run_dir)
    try:
        steps, missing = trace_steps(run_dir)
        figures = []
        for step in steps:
            trace = load_trace(trace_path(run_dir, step))
            figures.append(dynamics.step_figures(
                trace, sentence_responses=FLAGS.sentence_responses))
            if sys.stdout.isatty():
                print(f"read step {step} of {steps[-1]}", end="\r", flush=True)
    except DamagedTrace as error:
        raise common.UsageError(str(error)) from None
    folder = run_dir / "dynamics"
    phases = dynamics.phase_rows(figures)
    write_atomically(folder / "steps.csv", to_csv(dynamics.step_rows(figures)))
    write_atomically(folder / "thirds.csv", to_csv(phases))
    write_atomically(folder / "figure_3bc.png", dynamics_figures.outcome_picture(figures))
    write_atomically(folder / "figure_3de.png", dynamics_figures.variation_picture(figures))
    write_atomically(folder / "figure_3fg.png", dynamics_figures.credit_picture(figures))
    print(f"{table(phases)}\n\n{notes(figures, missing)}\npictures and numbers are in {folder}")


def table(phases: list[dict]) -> str:
    """Lays the main rates by third out as plain text."""
    names = [f"{group} {what}" for what in ("share of candidates", "localized", "non-degenerate",
                                            "all maximum", "mixed")
             for group in dynamics.GROUPS]
    names += ["entropy", "multiplier mean", *[f"multiplier p{p}" for p in dynamics.PERCENTILES],
              "pairs at the cap"]
    lines = [f"{'':34}" + "".join(f"{row['phase']:>12}" for row in phases),
             f"{'steps':34}" + "".join(
                 f"{str(row['first step']) + '-' + str(row['last step']):>12}" for row in phases)]
    for name in names:
        digits = 3 if name.startswith(("entropy", "multiplier")) else 1
        lines.append(f"{name:34}" + "".join(
            f"{'-' if row[name] != row[name] else format(row[name], f'.{digits}f'):>12}"
            for row in phases))
    errors = phases[-1]
    channel = max(value for name, value in errors.items()
                  if name.endswith("conservation error") and not name.startswith("merged"))
    lines.append(f"largest conservation error: {channel:.2e} of a channel, "
                 f"{errors['merged conservation error']:.2e} merged")
    return "\n".join(lines)


def notes(figures: list[dynamics.StepFigures], missing: list[int]) -> str:
    """Says what is not in the figures."""
    lines = []
    if missing:
        lines.append(f"{len(missing)} steps have no trace and are left out: "
                     + ", ".join(map(str, missing[:10])) + (", ..." if missing[10:] else ""))
    invalid = sum(one.invalid for one in figures)
    if invalid:
        lines.append(f"{invalid} responses without a valid judgment are left out")
    left_out = sum(one.left_out_C for one in figures)
    prompts = sum(one.prompts for one in figures)
    lines.append(f"left out of the reward outcomes, of {prompts} groups, for want of an atom of "
                 "the ideal level: " + ", ".join(
                     f"{count} of {name}"
                     for name, count in zip(("Ignore", "Bound", "Control"), left_out[::3])))
    if FLAGS.sentence_responses:
        lines.append(f"multipliers by sentence come from {FLAGS.sentence_responses} responses a "
                     "step")
    return "\n".join(lines)


def to_csv(rows: list[dict]) -> bytes:
    """Returns rows with one header; what could not be counted is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows({name: "" if value != value else value for name, value in row.items()}
                     for row in rows)
    return text.getvalue().encode()


if __name__ == "__main__":
    common.run(main)
