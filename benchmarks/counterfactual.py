"""How much faster is the shared counterfactual pass than scoring every pair as a row?

    python -m benchmarks.counterfactual --prompt_tokens=384 --response_tokens=128

Compares, on the same pairs and in the same run: the prefix tree; dense rows in JAX (logits at
response positions only); dense rows of transformers on torch, all logits, where torch is
installed (`--torch_rows` of them, since they take long). Equality is checked first. The last line
is one JSON object.
"""

import json

import jax
import numpy as np
from absl import app, flags

from benchmarks import floor, peers, workload
from memcalib_jax.models import default_model_path, load
from memcalib_jax.scoring import score_counterfactuals, score_dense
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.scoring.counterfactual import pack_groups
from memcalib_jax.scoring.prefix_tree import build_tree

FLAGS = flags.FLAGS
workload.define_size_flags()
flags.adopt_module_key_flags(workload)
flags.DEFINE_integer("atoms", 15, "Atoms of a prompt.")
flags.DEFINE_integer("batch_tokens", 4096, "Tokens of a dense device call.")
flags.DEFINE_integer("torch_rows", 16, "Rows that torch scores; 0: none.")


def main(_):
    params, config = load(default_model_path())
    shape = workload.Shape(FLAGS.groups, FLAGS.group_size, FLAGS.atoms, FLAGS.prompt_tokens,
                           FLAGS.response_tokens)
    groups = workload.counterfactual_groups(shape)
    prompts = [group.prompts[p] for group in groups for p, _ in group.pairs]
    responses = [group.responses[r] for group in groups for _, r in group.pairs]

    def shared():
        return score_counterfactuals(params, config, groups, bin_tokens=FLAGS.bin_tokens)

    def dense():
        return score_dense(params, config, prompts, responses, batch_tokens=FLAGS.batch_tokens)

    difference = max(np.abs(a - b).max() for a, b in zip(sum(shared(), []), dense(), strict=True))
    rate = floor.matmul_rate()
    tree_seconds = floor.seconds(shared, repeats=FLAGS.repeats)
    dense_seconds = floor.seconds(dense, repeats=FLAGS.repeats)
    packing = pack_groups(config, groups, bin_sizes(FLAGS.bin_tokens))
    tree_operations = floor.tree_operations(
        config, [build_tree(g.prompts, g.responses, g.pairs) for g in groups])
    dense_operations = floor.dense_operations(
        config, [(len(p), len(r)) for p, r in zip(prompts, responses)])

    result = {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "prompt_tokens": FLAGS.prompt_tokens, "response_tokens": FLAGS.response_tokens,
        "pairs": len(prompts), "largest_difference": float(difference),
        "dense_tokens": packing.dense_tokens, "tree_tokens": packing.tree_tokens,
        "padded_tokens": packing.padded_tokens,
        "tree_seconds": floor.median(tree_seconds), "dense_seconds": floor.median(dense_seconds),
        "speedup": floor.median(dense_seconds) / floor.median(tree_seconds),
        "operation_ratio": dense_operations / tree_operations,
        "matmul_rate": rate,
        "tree_share_of_rate": tree_operations / floor.median(tree_seconds) / rate,
        "dense_share_of_rate": dense_operations / floor.median(dense_seconds) / rate,
    }
    if FLAGS.torch_rows and peers.torch_available():
        rows = min(FLAGS.torch_rows, len(prompts))
        taken, log_probs = peers.torch_scores(
            params, config, prompts[:rows], responses[:rows], repeats=FLAGS.repeats)
        ours = score_dense(params, config, prompts[:rows], responses[:rows])
        result["torch_largest_difference"] = float(max(
            np.abs(a - b).max() for a, b in zip(ours, log_probs)))
        result["torch_seconds_for_all"] = floor.median(taken) * len(prompts) / rows
        result["speedup_over_torch"] = result["torch_seconds_for_all"] / result["tree_seconds"]

    print(f"{result['pairs']} pairs, prompt {FLAGS.prompt_tokens}, response "
          f"{FLAGS.response_tokens}; largest difference {difference:.1e} nats")
    print(f"{'':22}{'tokens':>10}{'seconds':>10}{'share of matmul rate':>24}")
    for name in ("dense", "tree"):
        print(f"{name:22}{result[f'{name}_tokens']:>10,}{result[f'{name}_seconds']:>10.2f}"
              f"{result[f'{name}_share_of_rate']:>24.0%}")
    print(f"speedup {result['speedup']:.2f}; operation ratio {result['operation_ratio']:.2f}; "
          f"matmul rate {rate / 1e9:.0f} GFLOP/s; seconds of all runs: "
          f"{', '.join(f'{s:.2f}' for s in tree_seconds)} and "
          f"{', '.join(f'{s:.2f}' for s in dense_seconds)}")
    if "speedup_over_torch" in result:
        print(f"transformers on torch, all logits: {result['torch_seconds_for_all']:.1f} s, "
              f"{result['speedup_over_torch']:.1f} times as long")
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
