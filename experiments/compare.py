"""Compares evaluations: the first with each of the others.

    python -m experiments.compare runs/before/results.json runs/after/results.json
"""

import sys

from absl import app

from memcalib_jax.evaluation.report import compare, load_results


def main(argv):
    paths = argv[1:]
    if len(paths) < 2:
        print("error: give at least two results files:\n"
              "  python -m experiments.compare BEFORE/results.json AFTER/results.json",
              file=sys.stderr)
        return 2
    try:
        before, *others = [load_results(path) for path in paths]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n\n".join(compare(before, after) for after in others))
    return 0


if __name__ == "__main__":
    app.run(main)
