"""How many tokens a second does the sampler draw, and how near is that to the machine's bound?

    python -m benchmarks.sampler --prompts=8 --group_size=1 --prompt_tokens=512 --max_tokens=128
    python -m benchmarks.sampler --prompts=8 --group_size=8 --spread

With `--spread` responses end at lengths spread from 16 tokens to `--max_tokens`: peers that decode
a fixed batch wait for the longest. Transformers' `generate` on torch runs the same prompts where it
is installed. Sampled log-probs are checked against the scorer's first. The last line is one JSON
object.
"""

import json
import time

import jax
import numpy as np
from absl import app, flags

from benchmarks import floor, peers
from memcalib_jax.models import default_model_path, load
from memcalib_jax.sampling import sample
from memcalib_jax.scoring import score_dense

FLAGS = flags.FLAGS
flags.DEFINE_integer("prompts", 8, "Prompts.")
flags.DEFINE_integer("group_size", 1, "Responses of a prompt.")
flags.DEFINE_integer("prompt_tokens", 512, "Tokens of a prompt.")
flags.DEFINE_integer("max_tokens", 128, "Longest response.")
flags.DEFINE_integer("max_rows", 64, "Most responses that decode at once.")
flags.DEFINE_bool("spread", False, "End responses at lengths spread from 16 to --max_tokens.")
flags.DEFINE_integer("repeats", 3, "Counted runs.")
flags.DEFINE_bool("torch", True, "Time transformers on torch as well, where it is installed.")


def stop_ids(config, spread: bool, max_tokens: int) -> list[int]:
    """Returns ids that end a random response after about an eighth of `max_tokens` or never."""
    if not spread:
        return []
    rng = np.random.default_rng(1)
    return rng.choice(config.vocab_size, config.vocab_size * 4 // max_tokens,
                      replace=False).tolist()


def main(_):
    params, config = load(default_model_path())
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, config.vocab_size, (FLAGS.prompts, FLAGS.prompt_tokens)).tolist()
    stops = stop_ids(config, FLAGS.spread, FLAGS.max_tokens)

    def run(max_tokens=FLAGS.max_tokens):
        return sample(params, config, prompts, num_samples=FLAGS.group_size,
                      max_tokens=max_tokens, key=jax.random.key(0), stop_ids=stops,
                      max_rows=FLAGS.max_rows)

    groups = run()
    drawn = [s for group in groups for s in group]
    scores = score_dense(params, config, [prompts[0]] * len(groups[0]),
                         [s.tokens for s in groups[0]])
    gap = max(np.abs(np.asarray(s.log_probs) - row).max() for s, row in zip(groups[0], scores))
    tokens = sum(len(s.tokens) for s in drawn)
    taken, prefill = [], []
    run(1)
    for _ in range(FLAGS.repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
        start = time.perf_counter()
        run(1)
        prefill.append(time.perf_counter() - start)
    steps = max(len(s.tokens) for s in drawn) - 1
    rows = min(len(drawn), FLAGS.max_rows)
    step_seconds = (floor.median(taken) - floor.median(prefill)) / max(steps, 1)
    rate = floor.matmul_rate()
    operations = floor.forward_operations(
        config, rows, rows * (FLAGS.prompt_tokens + FLAGS.max_tokens // 2), rows)
    parameter_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    result = {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "prompts": FLAGS.prompts, "group_size": FLAGS.group_size,
        "prompt_tokens": FLAGS.prompt_tokens, "max_tokens": FLAGS.max_tokens,
        "tokens": tokens, "lengths": [min(len(s.tokens) for s in drawn), steps + 1],
        "largest_gap_to_scorer": float(gap), "seconds": floor.median(taken),
        "prefill_seconds": floor.median(prefill), "step_seconds": step_seconds,
        "tokens_per_second": tokens / floor.median(taken), "matmul_rate": rate,
        "step_share_of_matmul_rate": operations / step_seconds / rate,
        "step_weight_bytes_per_second": parameter_bytes / step_seconds,
    }
    if FLAGS.torch and peers.torch_available():
        seconds, peer_tokens = peers.torch_generate(
            params, config, prompts, FLAGS.group_size, FLAGS.max_tokens, stops,
            repeats=FLAGS.repeats)
        result["torch_tokens_per_second"] = peer_tokens / floor.median(seconds)
        result["speedup_over_torch"] = (
            result["tokens_per_second"] / result["torch_tokens_per_second"])

    print(f"{FLAGS.prompts} x {FLAGS.group_size} responses after {FLAGS.prompt_tokens} tokens, "
          f"lengths {result['lengths'][0]} to {result['lengths'][1]}; gap to scorer {gap:.1e} nats")
    print(f"{tokens:,} tokens in {result['seconds']:.2f} s: "
          f"{result['tokens_per_second']:.0f} tokens/s, of which prefill "
          f"{result['prefill_seconds']:.2f} s; a step {1e3 * step_seconds:.0f} ms")
    print(f"a full step at {result['step_share_of_matmul_rate']:.0%} of the matmul rate "
          f"({rate / 1e9:.0f} GFLOP/s), weights read at "
          f"{result['step_weight_bytes_per_second'] / 1e9:.1f} GB/s")
    if "speedup_over_torch" in result:
        print(f"transformers' generate: {result['torch_tokens_per_second']:.0f} tokens/s; "
              f"ours {result['speedup_over_torch']:.2f} times")
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
