"""What do log-probs of chosen tokens cost, in time and memory, as the vocabulary grows?

    python -m benchmarks.log_probs

Ours walks the vocabulary in blocks. The peers are `jax.nn.log_softmax` over all logits, compiled,
and torch's where it is installed; values and gradients are checked against the former first.
Time is the median of interleaved runs; the share is of the matrix products' time at the machine's
own rate (one product forward, four for forward and both gradients with logits computed twice,
three for the peers, which keep them). Temporaries are the compiler's, without arguments and
results. The last line is one JSON object.
"""

import importlib.util
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import floor
from memcalib_jax.scoring import log_probs

FLAGS = flags.FLAGS
flags.DEFINE_integer("rows", 1024, "Tokens to score.")
flags.DEFINE_integer("hidden_size", 576, "Width of the hidden states.")
flags.DEFINE_multi_integer("vocabulary", [32768, 65536, 131072, 262144], "Vocabulary sizes.")
flags.DEFINE_integer("block", log_probs.VOCABULARY_BLOCK, "Tokens of a vocabulary block.")
flags.DEFINE_integer("repeats", 3, "Counted runs.")


def blockwise(hidden, head, targets):
    return log_probs.token_log_probs(hidden, head, targets)[0]


def plain(hidden, head, targets):
    logits = jnp.matmul(hidden, head.T, precision="highest")
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=-1)[:, 0]


def jax_calls(function, arrays):
    """Returns forward and forward-with-backward as compiled calls, and the temporaries of each."""
    gradients = jax.value_and_grad(lambda *inputs: function(*inputs).sum(), argnums=(0, 1))
    compiled = [jax.jit(f).lower(*arrays).compile() for f in (function, gradients)]
    return ([lambda program=program: program(*arrays) for program in compiled],
            [program.memory_analysis().temp_size_in_bytes for program in compiled])


def torch_calls(arrays):
    """Returns the same calls in torch."""
    import torch

    hidden, head = (torch.tensor(np.asarray(x), requires_grad=True) for x in arrays[:2])
    targets = torch.tensor(np.asarray(arrays[2]), dtype=torch.int64)[:, None]

    def score():
        return torch.log_softmax(hidden @ head.T, dim=-1).gather(1, targets)[:, 0]

    def forward():
        with torch.no_grad():
            return score().numpy()

    def backward():
        total = score().sum()
        gradients = torch.autograd.grad(total, (hidden, head))
        return total.detach().numpy(), [gradient.numpy() for gradient in gradients]

    return [forward, backward]


def largest_difference(results, expected):
    """Returns the greatest difference of log-probs and of gradients, each."""
    (values, (_, gradients)), (expected_values, (_, expected_gradients)) = results, expected
    return (float(np.abs(np.asarray(values) - expected_values).max()),
            max(float(np.abs(np.asarray(got) - want).max())
                for got, want in zip(gradients, expected_gradients)))


def measure(vocabulary: int) -> dict:
    """Returns, for each way, differences, seconds, share of the matmul rate and temporaries."""
    rng = np.random.default_rng(0)
    arrays = (jnp.asarray(rng.normal(size=(FLAGS.rows, FLAGS.hidden_size)), jnp.float32),
              jnp.asarray(rng.normal(scale=0.05, size=(vocabulary, FLAGS.hidden_size)),
                          jnp.float32),
              jnp.asarray(rng.integers(0, vocabulary, FLAGS.rows), jnp.int32))
    ways, temporaries = {}, {}
    for name, function in (("ours", blockwise), ("log_softmax", plain)):
        ways[name], temporaries[name] = jax_calls(function, arrays)
    if importlib.util.find_spec("torch"):
        ways["torch"] = torch_calls(arrays)

    expected = jax.device_get([call() for call in ways["log_softmax"]])
    differences = {}
    for name, calls in ways.items():
        differences[name] = largest_difference([call() for call in calls], expected)
        if max(differences[name]) > 1e-4:
            raise SystemExit(f"{name} differs from log_softmax by {differences[name]}: log-probs "
                             "or gradients are wrong, timing them means nothing")

    taken, rates = {(name, part): [] for name in ways for part in (0, 1)}, []
    for _ in range(FLAGS.repeats):
        rates.append(floor.matmul_rate())
        for name, part in taken:
            start = time.perf_counter()
            jax.block_until_ready(ways[name][part]())
            taken[name, part].append(time.perf_counter() - start)
    product = 2.0 * FLAGS.rows * FLAGS.hidden_size * vocabulary / floor.median(rates)
    result = {}
    for name in ways:
        forward, both = (floor.median(taken[name, part]) for part in (0, 1))
        products = 4 if name == "ours" else 3
        result[name] = {
            "log_prob_difference": differences[name][0],
            "gradient_difference": differences[name][1],
            "forward_seconds": forward, "both_seconds": both,
            "forward_share": product / forward, "both_share": products * product / both,
            "forward_temp_bytes": temporaries.get(name, (None, None))[0],
            "both_temp_bytes": temporaries.get(name, (None, None))[1],
        }
    return result


def main(_):
    log_probs.VOCABULARY_BLOCK = FLAGS.block
    print(f"{FLAGS.rows} rows of {FLAGS.hidden_size}, float32")
    print(f"{'vocabulary':>10} {'':12} {'forward s':>10} {'share':>6} {'both s':>8} {'share':>6} "
          f"{'forward MiB':>12} {'both MiB':>9}")
    results = {}
    for vocabulary in FLAGS.vocabulary:
        results[vocabulary] = measure(vocabulary)
        for name, row in results[vocabulary].items():
            memory = [f"{row[key] / 2**20:.0f}" if row[key] is not None else "-"
                      for key in ("forward_temp_bytes", "both_temp_bytes")]
            print(f"{vocabulary:10d} {name:12} {row['forward_seconds']:10.3f} "
                  f"{row['forward_share']:6.2f} {row['both_seconds']:8.3f} "
                  f"{row['both_share']:6.2f} {memory[0]:>12} {memory[1]:>9}", flush=True)
    print(json.dumps({
        "device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": FLAGS.rows,
        "hidden_size": FLAGS.hidden_size, "row_tile": log_probs.ROW_TILE, "block": FLAGS.block,
        "vocabularies": results}))


if __name__ == "__main__":
    app.run(main)
