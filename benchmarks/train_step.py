"""How long does a training step's gradient take, with each group's prompt computed once?

    python -m benchmarks.train_step --groups=2 --prompt_tokens=384 --response_tokens=128
    python -m benchmarks.train_step --plain_rows=4 --prompt_tokens=1 --response_tokens=255

Compares, on the same tokens and in the same run: trees of a prompt with its responses; every
response as a row with its prompt in JAX; the same rows in transformers on torch with all logits,
where it is installed. Gradients of the trees are checked against the rows' first. The last line is
one JSON object.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import floor, peers, workload
from memcalib_jax.models import default_model_path, load
from memcalib_jax.models.packed import REMAT
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.scoring.packing import pack
from memcalib_jax.scoring.prefix_tree import build_tree
from memcalib_jax.training.update import ObjectiveConfig, PolicyBatch, gradient_sums

FLAGS = flags.FLAGS
workload.define_size_flags()
flags.adopt_module_key_flags(workload)
flags.DEFINE_integer("plain_rows", 0, "If positive: that many groups of one response instead.")
flags.DEFINE_bool("torch", True, "Time transformers on torch as well, where it is installed.")
flags.DEFINE_enum("remat", "none", REMAT, "What the backward pass computes again.")


def batches(trees, bin_tokens):
    """Packs trees with advantage 1 and log-probs 0 everywhere."""
    packing = pack(trees, bin_sizes(bin_tokens))
    result = []
    for scored in packing.batches:
        zeros = np.zeros(scored.targets.shape, np.float32)
        mask = np.arange(scored.targets.shape[1]) < scored.counts[:, None]
        # Old log-probs that make no ratio large, so that no gradient is clipped away.
        result.append(PolicyBatch(scored, zeros, zeros - 3.0, zeros + 1.0, mask))
    return result


def main(_):
    params, config = load(default_model_path())
    objective = ObjectiveConfig(compute_dtype="float32", remat=FLAGS.remat)
    groups, size = ((FLAGS.plain_rows, 1) if FLAGS.plain_rows
                    else (FLAGS.groups, FLAGS.group_size))
    shape = workload.Shape(groups, size, 15, FLAGS.prompt_tokens, FLAGS.response_tokens)
    rng = np.random.default_rng(0)
    prompts = [workload.text_tokens(rng, shape.prompt_tokens).tolist() for _ in range(groups)]
    responses = [[workload.text_tokens(rng, shape.response_tokens).tolist() for _ in range(size)]
                 for _ in range(groups)]
    trees = [build_tree([prompt], rows, [(0, g) for g in range(size)])
             for prompt, rows in zip(prompts, responses)]
    rows = [build_tree([prompt], [response], [(0, 0)])
            for prompt, group in zip(prompts, responses) for response in group]

    def gradient(packed):
        return gradient_sums(params, config, packed, objective)[0]

    tree_batches, row_batches = batches(trees, FLAGS.bin_tokens), batches(rows, FLAGS.bin_tokens)
    pairs = list(zip(jax.tree.leaves(gradient(tree_batches)),
                     jax.tree.leaves(gradient(row_batches))))
    scale = max(float(jnp.abs(b).max()) for _, b in pairs)
    difference = max(float(jnp.abs(a - b).max()) for a, b in pairs) / scale
    rate = floor.matmul_rate()
    tree_seconds = floor.seconds(lambda: gradient(tree_batches), repeats=FLAGS.repeats)
    row_seconds = floor.seconds(lambda: gradient(row_batches), repeats=FLAGS.repeats)
    tree_operations = floor.tree_operations(config, trees)
    row_operations = floor.tree_operations(config, rows)
    result = {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "remat": FLAGS.remat, "groups": groups, "group_size": size,
        "prompt_tokens": shape.prompt_tokens,
        "response_tokens": shape.response_tokens, "largest_relative_difference": difference,
        "tree_seconds": floor.median(tree_seconds), "row_seconds": floor.median(row_seconds),
        "speedup": floor.median(row_seconds) / floor.median(tree_seconds),
        "operation_ratio": row_operations / tree_operations, "matmul_rate": rate,
        # A backward pass takes twice a forward's operations; what is computed again is not work.
        "tree_share_of_rate": 3 * tree_operations / floor.median(tree_seconds) / rate,
        "row_share_of_rate": 3 * row_operations / floor.median(row_seconds) / rate,
    }
    if FLAGS.torch and peers.torch_available():
        taken = peers.torch_gradients(
            params, config, [p + r for p, g in zip(prompts, responses) for r in g],
            shape.response_tokens, repeats=FLAGS.repeats)
        result["torch_seconds"] = floor.median(taken)
        result["speedup_over_torch"] = floor.median(taken) / result["tree_seconds"]

    print(f"{groups} prompts of {shape.prompt_tokens} tokens x {size} responses of "
          f"{shape.response_tokens}; largest relative difference of a gradient {difference:.1e}")
    print(f"{'':22}{'seconds':>10}{'share of matmul rate':>24}")
    for name in ("row", "tree"):
        print(f"{name + 's':22}{result[f'{name}_seconds']:>10.2f}"
              f"{result[f'{name}_share_of_rate']:>24.0%}")
    print(f"speedup {result['speedup']:.2f}; operation ratio {result['operation_ratio']:.2f}; "
          f"matmul rate {rate / 1e9:.0f} GFLOP/s")
    if "speedup_over_torch" in result:
        print(f"transformers on torch, all logits: {result['torch_seconds']:.1f} s, "
              f"{result['speedup_over_torch']:.1f} times as long")
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
