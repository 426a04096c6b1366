"""How do seconds of the counterfactual pass grow with atoms, responses and prompt length?

    python -m benchmarks.growth --picture=growth.png

Varies one of them at a time around `--prompt_tokens`, `--response_tokens`, 15 atoms and groups of
8, on one group, and counts the tokens that the tree and dense rows have beside the seconds of the
tree. The last line is one JSON object.
"""

import json

import jax
import matplotlib
import numpy as np
from absl import app, flags

from benchmarks import floor, workload
from memcalib_jax.models import default_model_path, load
from memcalib_jax.scoring import score_counterfactuals
from memcalib_jax.scoring.prefix_tree import build_tree

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_integer("prompt_tokens", 384, "Tokens of a prompt.")
flags.DEFINE_integer("response_tokens", 64, "Tokens of a response.")
flags.DEFINE_list("atoms", ["4", "8", "16", "32", "64"], "Numbers of atoms.")
flags.DEFINE_list("group_sizes", ["2", "4", "8", "16", "32"], "Responses of a prompt.")
flags.DEFINE_list("prompt_lengths", ["256", "512", "1024", "2048", "4096"], "Tokens of a prompt.")
flags.DEFINE_integer("bin_tokens", 4096, "About the most tokens of a packed device call.")
flags.DEFINE_integer("repeats", 1, "Counted runs.")
flags.DEFINE_string("picture", "growth.png", "Where the picture goes.")


def measure(params, config, shape: workload.Shape) -> dict:
    """Returns tokens and seconds of one workload."""
    groups = workload.counterfactual_groups(shape)
    trees = [build_tree(group.prompts, group.responses, group.pairs) for group in groups]
    taken = floor.seconds(
        lambda: score_counterfactuals(params, config, groups, bin_tokens=FLAGS.bin_tokens),
        repeats=FLAGS.repeats)
    return {"seconds": floor.median(taken), "tree_tokens": sum(tree.tokens for tree in trees),
            "dense_tokens": sum(tree.dense_tokens for tree in trees),
            "pairs": sum(len(group.pairs) for group in groups)}


def draw(result: dict, path: str):
    """Draws seconds against each size, with the tokens of the tree and of dense rows."""
    figure, axes = plt.subplots(1, len(result), figsize=(4.2 * len(result), 3.6))
    for axis, (name, rows) in zip(axes, result.items()):
        sizes, seconds = list(rows), [row["seconds"] for row in rows.values()]
        axis.plot(sizes, seconds, "o-", label="seconds, tree")
        scale = seconds[0] / list(rows.values())[0]["tree_tokens"]
        for kind, style in (("tree", ":"), ("dense", "--")):
            axis.plot(sizes, [scale * row[f"{kind}_tokens"] for row in rows.values()], style,
                      label=f"in proportion to {kind} tokens")
        axis.set(xscale="log", yscale="log", xlabel=name.replace("_", " "))
        axis.set_xticks(sizes, sizes, minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(_):
    params, config = load(default_model_path())

    def shape(atoms=15, group_size=8, prompt_tokens=FLAGS.prompt_tokens):
        return workload.Shape(1, group_size, atoms, prompt_tokens, FLAGS.response_tokens)

    varied = {"atoms": ("atoms", FLAGS.atoms), "responses of a group": ("group_size",
              FLAGS.group_sizes), "prompt tokens": ("prompt_tokens", FLAGS.prompt_lengths)}
    result = {}
    for name, (field, sizes) in varied.items():
        result[name] = {}
        print(f"{name:>22}{'pairs':>8}{'tree tokens':>14}{'dense tokens':>14}{'seconds':>10}")
        for size in map(int, sizes):
            row = result[name][size] = measure(params, config, shape(**{field: size}))
            print(f"{size:>22}{row['pairs']:>8}{row['tree_tokens']:>14,}"
                  f"{row['dense_tokens']:>14,}{row['seconds']:>10.2f}", flush=True)
    draw(result, FLAGS.picture)
    slopes = {name: float(np.polyfit(
        np.log([row["tree_tokens"] for row in rows.values()]),
        np.log([row["seconds"] for row in rows.values()]), 1)[0]) for name, rows in result.items()}
    print("seconds grow as tree tokens to the power of " + ", ".join(
        f"{slope:.2f} ({name})" for name, slope in slopes.items()))
    print(json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__,
                      "powers": slopes, "rows": result}))


if __name__ == "__main__":
    app.run(main)
