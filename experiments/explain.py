r"""Shows why each token of a response has its advantage, channel by channel.

    python -m experiments.explain --run_dir=runs/first --step=3 --response=coding_0012/4

The response is <record id>/<number within its group>, as in the step's rollouts. It is shown in the
terminal, and written to the run's explanations/ as a page that a browser opens without a server.
"""

import pathlib
import re
import sys

import numpy as np
from absl import flags

from experiments import common
from memcalib_jax.evaluation.explanation import explain, page, terminal
from memcalib_jax.evaluation.trace import DamagedTrace, Trace, load_trace, trace_path, trace_steps
from memcalib_jax.files import write_atomically

FLAGS = flags.FLAGS

flags.DEFINE_string("run_dir", None, "Folder of a training run.", required=True)
flags.DEFINE_integer("step", None, "Step; default: the last.", lower_bound=1)
flags.DEFINE_string("response", None, "Response, as <record id>/<number>; default: the one whose "
                    "advantages differ most between tokens.")


def main():
    run_dir = pathlib.Path(FLAGS.run_dir)
    try:
        step = FLAGS.step or trace_steps(run_dir)[0][-1]
        trace = load_trace(trace_path(run_dir, step))
    except DamagedTrace as error:
        raise common.UsageError(str(error)) from None
    explanation = explain(trace, chosen(trace))
    print(terminal(explanation, colored=sys.stdout.isatty()))
    name = re.sub(r"[^\w.-]", "_", explanation.name)
    path = run_dir / "explanations" / f"step_{step}_{name}.html"
    write_atomically(path, page(explanation).encode())
    print(f"\nthe page is {path}")


def chosen(trace: Trace) -> int:
    """Returns the response of the flag, or the one with the most spread of advantages."""
    count = len(trace.length_R)
    if FLAGS.response is None:
        return int(np.argmax([trace.advantage_N[trace.tokens_of(r)].std() for r in range(count)]))
    try:
        return trace.find(FLAGS.response)
    except KeyError:
        names = [trace.name(r) for r in range(count)]
        more = ", ..." if count > 8 else ""
        raise common.UsageError(
            f"--response={FLAGS.response} is none of step {trace.step}'s {count}: "
            f"{', '.join(names[:8])}{more}") from None


if __name__ == "__main__":
    common.run(main)
