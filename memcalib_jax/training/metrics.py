"""A step's metrics and its rollouts as rows, from arrays on the host."""

import collections

import numpy as np

from memcalib_jax.credit import CHANNELS, CreditConfig
from memcalib_jax.data import LEVELS
from memcalib_jax.evaluation import calibration_metrics
from memcalib_jax.judge import Judgment
from memcalib_jax.training.advantages import Counterfactuals, Credit, JudgedLevels
from memcalib_jax.training.rollouts import Rollouts
from memcalib_jax.training.stopwatch import Stopwatch

# Names of the fallback codes 0..6 of `CreditDiagnostics`.
FALLBACKS = ("localized", "no_atoms", "not_localizable", "not_scored", "weak_signal",
             "zero_score", "direction")


def rollout_metrics(rollouts: Rollouts, levels: JudgedLevels,
                    judgments: list[list[Judgment]]) -> dict[str, float]:
    """Returns the six calibration metrics of the rollouts, lengths, endings and validity."""
    atoms = levels.ideal_P_G_A.shape[-1]
    samples = [sample for row in rollouts.samples for sample in row]
    lengths = np.array([len(sample.tokens) for sample in samples])
    calibration = calibration_metrics(
        levels.ideal_P_G_A.reshape(-1, atoms), levels.actual_P_G_A.reshape(-1, atoms),
        levels.atom_mask_P_G_A.reshape(-1, atoms), valid_N=levels.valid_P_G.reshape(-1))
    reasons = collections.Counter(
        j.reason.split(":")[0] for row in judgments for j in row if not j.valid)
    return {f"rollout/{name}": value for name, value in calibration.items()} | {
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/stopped": float(np.mean([s.finish_reason == "stop" for s in samples])),
        "rollout/tokens": float(lengths.sum()),
        "judge/valid": float(levels.valid_P_G.mean()),
    } | {f"judge/invalid/{reason}": count / len(samples) for reason, count in reasons.items()}


def channel_metrics(assigned: Credit, levels: JudgedLevels,
                    config: CreditConfig) -> dict[str, float]:
    """Returns mean reward, trigger rate and share of groups that vary, by channel."""
    rewards, valid = assigned.rewards_P_G_C, levels.valid_P_G
    result = {}
    for channel, name in enumerate(CHANNELS):
        values = rewards[..., channel]
        varies = [row[ok].std() >= float(config.min_std) if ok.sum() > 1 else False
                  for row, ok in zip(values, valid)]
        result |= {
            f"credit/{name}/reward": float(values[valid].mean()),
            f"credit/{name}/trigger_rate": float((values[valid] != 0).mean()),
            f"credit/{name}/nondegenerate_groups": float(np.mean(varies)),
        }
    tokens = assigned.advantages_P_G_T
    return result | {"credit/advantage_rms": float(np.sqrt(np.mean(np.square(
        tokens[tokens != 0])))) if np.any(tokens) else 0.0}


def localization_metrics(assigned: Credit, scores: Counterfactuals,
                         levels: JudgedLevels) -> dict[str, float]:
    """Returns thresholds, localized shares, fallback reasons and the counterfactual pass."""
    diagnostics = assigned.diagnostics
    result = {
        "credit/noise_floor": scores.noise,
        "credit/pairs_scored": float(scores.scored_P_G_C.sum()),
        "credit/dense_tokens": float(scores.packing.dense_tokens),
        "credit/tree_tokens": float(scores.packing.tree_tokens),
        "credit/padded_tokens": float(scores.packing.padded_tokens),
        "credit/rms": float(diagnostics.rms),
    }
    fallback = np.where(levels.valid_P_G[..., None], diagnostics.fallback, -1)
    thresholds = np.asarray(assigned.thresholds_C)
    for channel, name in enumerate(CHANNELS[1:], start=1):
        codes = fallback[..., channel]
        triggered = max(int(((codes >= 0) & (codes != FALLBACKS.index("no_atoms"))).sum()), 1)
        result[f"credit/{name}/threshold"] = float(thresholds[channel])
        for code, outcome in enumerate(FALLBACKS):
            if outcome != "no_atoms":
                result[f"credit/{name}/{outcome}"] = float((codes == code).sum()) / triggered
    return result


def router_metrics(load_L_E: np.ndarray) -> dict[str, float]:
    """Returns how evenly routers spread tokens over experts, each figure a mean over layers.

    `load_max` is the busiest expert's load over the mean load (1 where even, E / k at most),
    `load_entropy` the entropy of the loads in nats (log E where even), and `unused` the share of
    experts that no token chose.

    Args:
      load_L_E: float `[L, E]`, tokens that each expert of each layer got; every layer some.
    """
    load = np.asarray(load_L_E, np.float64)
    shares = load / load.sum(axis=1, keepdims=True)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=1)
    return {"router/load_max": float(shares.max(axis=1).mean() * load.shape[1]),
            "router/load_entropy": float(entropy.mean()),
            "router/unused": float((load == 0).mean())}


def time_metrics(watch: Stopwatch, rollouts: Rollouts) -> dict[str, float]:
    """Returns seconds by phase and in all, and sampled tokens a second of sampling."""
    total = sum(watch.seconds.values())
    return {f"time/{name}": seconds for name, seconds in watch.seconds.items()} | {
        "time/step": total,
        "time/sampled_tokens_per_second":
            rollouts.num_tokens / max(watch.seconds.get("sample", 0.0), 1e-9),
    }


def rollout_rows(rollouts: Rollouts, judgments: list[list[Judgment]],
                 assigned: Credit) -> list[dict]:
    """Returns one JSON-able object a response: tokens, text, judgment, channels, advantages."""
    rows = []
    for p, prompt in enumerate(rollouts.prompts):
        for g, (sample, judgment) in enumerate(zip(rollouts.samples[p], judgments[p])):
            length = len(sample.tokens)
            rows.append({
                "id": prompt.record.id, "sample": g,
                "text": rollouts.texts[p][g], "tokens": [int(t) for t in sample.tokens],
                "log_probs": _floats(sample.log_probs), "finish_reason": sample.finish_reason,
                "valid": judgment.valid, "reason": judgment.reason,
                "levels": None if judgment.levels is None else {
                    atom.id: LEVELS[level]
                    for atom, level in zip(prompt.record.atoms, judgment.levels)},
                "channels": _channels(prompt, judgment, assigned, p, g),
                "advantages": _floats(assigned.advantages_P_G_T[p, g, :length]),
            })
    return rows


def _channels(prompt, judgment: Judgment, assigned: Credit, p: int, g: int) -> dict:
    if not judgment.valid:
        return {}
    result = {}
    for channel, name in enumerate(CHANNELS):
        atoms = [atom.id for atom, actual in zip(prompt.record.atoms, judgment.levels)
                 if 3 * atom.ideal + actual == channel]
        if not atoms:
            continue
        result[name] = {"atoms": atoms, "reward": float(assigned.rewards_P_G_C[p, g, channel])}
        if assigned.diagnostics is not None:
            result[name] |= {
                "advantage": float(assigned.diagnostics.channel_advantages[p, g, channel]),
                "credit": FALLBACKS[int(assigned.diagnostics.fallback[p, g, channel])]}
    return result


def _floats(values) -> list[float]:
    return [round(float(value), 6) for value in values]
