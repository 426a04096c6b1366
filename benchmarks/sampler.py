"""How many tokens a second does the sampler draw, and how near is that to the machine's bound?

    python -m benchmarks.sampler --prompts=8 --group_size=1 --prompt_tokens=512 --max_tokens=128
    python -m benchmarks.sampler --prompts=8 --group_size=8 --spread

With `--spread` responses end at lengths spread from 16 tokens to `--max_tokens`: peers that decode
a fixed batch wait for the longest. Transformers' `generate` on torch runs the same prompts where it
is installed. Sampled log-probs are checked against the scorer's first. A decoding step of 1, 8 and
64 rows is held against the longer of two times: of reading the weights and the live cache once at
the machine's read bandwidth, and of the step's operations at its matmul rate. The last line is one
JSON object.
"""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import floor, peers
from memcalib_jax.models import default_model_path, load
from memcalib_jax.models.stack import separate_layers
from memcalib_jax.sampling import sample
from memcalib_jax.sampling.decode import Request, decode_block, vacant_rows
from memcalib_jax.sampling.draw import Rule
from memcalib_jax.sampling.sampler import BLOCK_STEPS
from memcalib_jax.scoring import score_dense

FLAGS = flags.FLAGS
STEP_ROWS = ((1, 1), (8, 1), (8, 8))  # prompts and responses of each
TAIL_TOKENS, TAIL_SIZE = 64, 128
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


def step_seconds(params, config, num_slots: int, group_size: int) -> float:
    """Returns the best seconds of a decoding step, its head and its draws included."""
    rows = vacant_rows(params, config, num_slots=num_slots, group_size=group_size,
                       prompt_size=FLAGS.prompt_tokens, tail_size=TAIL_SIZE)
    cache = rows.cache.replace(
        prompt_length=jnp.full_like(rows.cache.prompt_length, FLAGS.prompt_tokens))
    rows = rows.replace(cache=cache, done=jnp.zeros_like(rows.done))
    request = Request(jax.random.key(0), Rule(), jnp.full(8, -1), jnp.asarray(2 ** 30))
    separate, taken = separate_layers(params), []
    for _ in range(FLAGS.repeats + 3):
        length = jnp.full_like(rows.cache.tail_length, TAIL_TOKENS - BLOCK_STEPS // 2)
        rows = rows.replace(cache=rows.cache.replace(tail_length=length))
        start = time.perf_counter()
        rows, tokens, *_ = decode_block(separate, config, rows, request, BLOCK_STEPS)
        jax.block_until_ready(tokens)
        taken.append(time.perf_counter() - start)
    return min(taken[1:]) / BLOCK_STEPS


def step_floor(params, config, num_slots: int, group_size: int) -> tuple[int, float]:
    """Returns the bytes of the weights and the live cache, and the operations of a step."""
    rows, keys = num_slots * group_size, params["layers"]["k"]
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * keys.itemsize
    cached = num_slots * FLAGS.prompt_tokens + rows * TAIL_TOKENS
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    return weights + cached * token_bytes, floor.forward_operations(
        config, rows, rows * (FLAGS.prompt_tokens + TAIL_TOKENS), rows)


def measured_steps(params, config, bandwidth: float, rate: float) -> list[dict]:
    """Returns for each of `STEP_ROWS` what a step takes and its share of the machine's bound."""
    steps = []
    for num_slots, group_size in STEP_ROWS:
        seconds = step_seconds(params, config, num_slots, group_size)
        size, operations = step_floor(params, config, num_slots, group_size)
        steps.append({
            "rows": num_slots * group_size, "seconds": seconds,
            "share_of_read_bandwidth": size / seconds / bandwidth,
            "share_of_matmul_rate": operations / seconds / rate,
            "share_of_bound": max(size / bandwidth, operations / rate) / seconds})
    return steps


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
    lengths = [len(s.tokens) for s in drawn]
    bandwidth, rate = floor.read_bandwidth(), floor.matmul_rate()
    result = {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "prompts": FLAGS.prompts, "group_size": FLAGS.group_size,
        "prompt_tokens": FLAGS.prompt_tokens, "max_tokens": FLAGS.max_tokens,
        "tokens": tokens, "lengths": [min(lengths), max(lengths)],
        "largest_gap_to_scorer": float(gap), "seconds": floor.median(taken),
        "prefill_seconds": floor.median(prefill),
        "tokens_per_second": tokens / floor.median(taken),
        "read_bandwidth": bandwidth, "matmul_rate": rate,
        "steps": measured_steps(params, config, bandwidth, rate),
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
          f"{result['prefill_seconds']:.2f} s")
    print(f"reads {bandwidth / 1e9:.1f} GB/s, multiplies at {rate / 1e9:.0f} GFLOP/s")
    for step in result["steps"]:
        print(f"a step of {step['rows']} rows: {1e3 * step['seconds']:.0f} ms, "
              f"{step['share_of_read_bandwidth']:.0%} of the bandwidth, "
              f"{step['share_of_matmul_rate']:.0%} of the rate")
    if "speedup_over_torch" in result:
        print(f"transformers' generate: {result['torch_tokens_per_second']:.0f} tokens/s; "
              f"ours {result['speedup_over_torch']:.2f} times")
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
