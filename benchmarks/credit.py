"""What does credit assignment cost for a full batch, thresholds included?

    python -m benchmarks.credit

64 prompts x 8 responses x 9 channels; responses of up to `--max_tokens` tokens. The peer is a
vectorized float64 numpy version called once for each (response, channel): a projection by sorting
and `np.quantile` of the pooled scores. Multipliers are checked against it first. The last line is
one JSON object.
"""

import json
import time

import jax
import numpy as np
from absl import app, flags

from benchmarks import floor
from memcalib_jax import credit

FLAGS = flags.FLAGS
flags.DEFINE_integer("prompts", 64, "Prompts.")
flags.DEFINE_integer("group_size", 8, "Responses of a prompt.")
flags.DEFINE_integer("max_tokens", 512, "Longest response.")
flags.DEFINE_integer("repeats", 5, "Counted runs.")


def batch(prompts: int, group_size: int, max_tokens: int, seed: int = 0) -> dict:
    """Returns the arguments of `memcalib_advantages` for a random batch, as numpy arrays."""
    rng = np.random.default_rng(seed)
    shape = (prompts, group_size)
    atoms = 15
    ideal = np.broadcast_to(rng.choice(3, (prompts, 1, atoms), p=(.843, .081, .076)),
                            (*shape, atoms))
    actual = np.where(rng.random((*shape, atoms)) < 0.8, ideal, rng.choice(3, (*shape, atoms)))
    mask = np.ones(ideal.shape, bool)
    members = np.asarray(credit.channel_members(ideal, actual, mask)).any(-1)
    lengths = rng.integers(max_tokens // 4, max_tokens + 1, shape)
    full = -rng.exponential(size=(*shape, max_tokens))
    difference = rng.normal(scale=0.05, size=(*shape, 9, max_tokens))
    difference += (rng.random(difference.shape) < 0.05) * rng.normal(size=difference.shape)
    return {
        "rewards_P_G_C": np.asarray(credit.channel_rewards(ideal, actual, mask)),
        "valid_P_G": rng.random(shape) < 0.97,
        "full_log_probs_P_G_T": full.astype(np.float32),
        "ablated_log_probs_P_G_C_T": (full[:, :, None] - difference).astype(np.float32),
        "scored_P_G_C": members & (np.arange(9) > 0),
        "response_mask_P_G_T": np.arange(max_tokens) < lengths[..., None],
    }


def numpy_project(multipliers, cap=4.0):
    """Projects one response's multipliers on [0, cap] with mean 1, by sorting breakpoints."""
    points = np.sort(np.concatenate([multipliers - cap, multipliers]))
    totals = np.clip(multipliers[None] - points[:, None], 0, cap).sum(1)
    index = np.searchsorted(-totals, -len(multipliers), side="right")
    low, high = points[index - 1], points[min(index, len(points) - 1)]
    total_low, total_high = totals[index - 1], totals[min(index, len(points) - 1)]
    share = 0 if total_low == total_high else (
        (total_low - len(multipliers)) / (total_low - total_high))
    return np.clip(multipliers - (low + share * (high - low)), 0, cap)


def numpy_multipliers(data, diagnostics, thresholds):
    """Projects each localized pair in turn, then moves the thresholds; returns both."""
    signs = np.asarray(credit.localization_signs(), np.float64)
    result, pools = {}, [[] for _ in range(9)]
    for p, g, c in zip(*np.nonzero(data["scored_P_G_C"] & data["valid_P_G"][..., None])):
        mask = data["response_mask_P_G_T"][p, g]
        aligned = signs[c] * (data["full_log_probs_P_G_T"][p, g, mask].astype(np.float64)
                              - data["ablated_log_probs_P_G_C_T"][p, g, c, mask])
        clipped = np.clip(aligned, -3, 3)
        pools[c].append(clipped)
        if diagnostics.localized[p, g, c]:
            scores = np.maximum(clipped - thresholds[c], 0)
            result[p, g, c] = numpy_project(len(scores) * scores / scores.sum())
    moved = [0.9 * old + 0.1 * max(0.02, np.quantile(np.concatenate(pool), 0.75))
             if sum(map(len, pool)) >= 256 else old for old, pool in zip(thresholds, pools)]
    return result, np.array(moved)


def main(_):
    data = batch(FLAGS.prompts, FLAGS.group_size, FLAGS.max_tokens)
    arrays = jax.device_put(data)
    thresholds = credit.init_thresholds()

    @jax.jit
    def ours(arrays, thresholds):
        advantages, diagnostics = credit.memcalib_advantages(thresholds_C=thresholds, **arrays)
        return advantages, diagnostics, credit.update_thresholds(
            thresholds, diagnostics.scores, diagnostics.score_mask)

    _, diagnostics, moved = jax.device_get(ours(arrays, thresholds))
    start = time.perf_counter()
    reference, reference_moved = numpy_multipliers(
        data, diagnostics, np.asarray(thresholds, np.float64))
    numpy_seconds = time.perf_counter() - start
    largest = conserved = 0.0
    for (p, g, c), expected in reference.items():
        mask = data["response_mask_P_G_T"][p, g]
        got = diagnostics.multipliers[p, g, c, mask]
        largest = max(largest, np.abs(got - expected).max())
        advantage = np.float64(diagnostics.channel_advantages[p, g, c])
        conserved = max(conserved, abs(advantage * (got.astype(np.float64).mean() - 1))
                        / max(1, abs(advantage)))
    taken = floor.seconds(lambda: ours(arrays, thresholds), repeats=FLAGS.repeats)
    result = {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "batch": [FLAGS.prompts, FLAGS.group_size, 9, FLAGS.max_tokens],
        "localized_pairs": len(reference), "seconds": floor.median(taken),
        "numpy_seconds": numpy_seconds, "speedup": numpy_seconds / floor.median(taken),
        "largest_multiplier_difference": float(largest),
        "largest_threshold_difference": float(np.abs(moved - reference_moved).max()),
        "conservation_error": float(conserved),
    }
    print(f"{FLAGS.prompts} x {FLAGS.group_size} x 9 x {FLAGS.max_tokens}, "
          f"{len(reference)} localized pairs")
    print(f"ours {result['seconds']:.3f} s, numpy {numpy_seconds:.3f} s "
          f"({result['speedup']:.1f} times); multipliers differ by {largest:.1e}, thresholds by "
          f"{result['largest_threshold_difference']:.1e}; mean kept within {conserved:.1e}")
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
