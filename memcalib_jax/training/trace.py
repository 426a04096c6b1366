"""Puts together what a step's trace keeps: scored pairs and valid tokens, nothing padded."""

import jax
import numpy as np

from memcalib_jax import credit
from memcalib_jax.data.sentences import token_ends
from memcalib_jax.evaluation.trace import Trace
from memcalib_jax.judge import Judgment
from memcalib_jax.training.advantages import Counterfactuals, Credit, JudgedLevels
from memcalib_jax.training.rollouts import Rollouts

_NO_ATOMS, _NOT_SCORED = 1, 3  # fallback codes


def make_trace(step: int, method: str, tokenizer, rollouts: Rollouts,
               judgments: list[list[Judgment]], levels: JudgedLevels, assigned: Credit,
               scores: Counterfactuals | None, thresholds_C: jax.Array,
               config: credit.CreditConfig, entropy: float, *,
               sentence_ids_P_G_T: np.ndarray | None = None,
               sentence_thresholds_C: jax.Array | None = None,
               stop_mask_P_G_T: np.ndarray | None = None) -> Trace:
    """Returns the trace of a step.

    Args:
      step: from 1.
      method: "memcalib", "gdpo" or "grpo".
      tokenizer: that of the model; the trace keeps each token's text.
      rollouts, judgments, levels: responses and what was judged.
      assigned, scores: the credit and the counterfactuals that it comes from; None without.
      thresholds_C: float32, those that the credit was assigned with, nats.
      config: constants of the credit assignment.
      entropy: mean entropy of the step's tokens, nats.
      sentence_ids_P_G_T, sentence_thresholds_C, stop_mask_P_G_T: what else the credit was assigned
        with, see `memcalib_advantages`.
    """
    lengths = np.array([len(s.tokens) for row in rollouts.samples for s in row], np.int32)
    num_responses, group = len(lengths), len(rollouts.samples[0])
    max_tokens = assigned.advantages_P_G_T.shape[-1]
    kept = np.arange(max_tokens) < lengths[:, None]
    flat = {name: value.reshape((num_responses, *value.shape[2:])) for name, value in {
        "actual": np.where(levels.atom_mask_P_G_A, levels.actual_P_G_A, -1),
        "advantages": assigned.advantages_P_G_T, "valid": levels.valid_P_G,
        **_explanation(method, levels, assigned, config)}.items()}
    return Trace(
        step=step,
        settings=_settings(method, config),
        rms=_rms(method, levels, assigned, config),
        entropy=entropy,
        noise=None if scores is None else scores.noise,
        records=[{"id": record.id, "question": record.question, "atoms": [
            {"id": atom.id, "text": atom.text, "ideal": atom.ideal} for atom in record.atoms]}
            for record in rollouts.records],
        record_R=np.repeat(np.arange(len(rollouts.prompts), dtype=np.int32), group),
        sample_R=np.tile(np.arange(group, dtype=np.int32), len(rollouts.prompts)),
        valid_R=flat["valid"],
        length_R=lengths,
        actual_R_A=flat["actual"].astype(np.int8),
        rewards_R_C=flat["rewards"],
        channel_advantages_R_C=flat["channel_advantages"],
        signal_gate_R_C=flat["signal_gate"],
        direction_gate_R_C=flat["direction_gate"],
        fallback_R_C=flat["fallback"],
        thresholds_C=np.asarray(thresholds_C, np.float32),
        advantage_N=flat["advantages"][kept],
        sentence_thresholds_C=None if sentence_thresholds_C is None
        else np.asarray(sentence_thresholds_C, np.float32),
        sentence_N=_tokens(sentence_ids_P_G_T, kept, np.int32),
        stop_N=_tokens(stop_mask_P_G_T, kept, bool),
        **_texts(tokenizer, rollouts, judgments),
        **_pairs(assigned, scores, lengths, flat["fallback"]))


def _settings(method, config):
    nine = np.ones(len(credit.CHANNELS))
    weights = 1.0 if config.channel_weights is None else np.asarray(config.channel_weights)
    return {"method": method, "mode": config.mode, "granularity": config.granularity,
            "merge_overuse": config.merge_overuse,
            "eta_C": (nine * np.asarray(config.eta, np.float32)).tolist(),
            "channel_weights_C": (nine * weights).tolist()} | {
        name: float(getattr(config, name)) for name in (
            "cap", "max_difference", "min_signal", "min_sentence_signal", "coverage_power",
            "epsilon", "min_std")}


def _explanation(method, levels, assigned, config):
    """Returns rewards, channel advantages, gates and fallback codes, `[P, G, C]`."""
    found = assigned.diagnostics
    if found is not None:
        rewards = assigned.rewards_P_G_C
        if config.merge_overuse:
            rewards = np.asarray(
                credit.channels.merge_overuse_rewards(jax.numpy.asarray(rewards)))
        return {"rewards": rewards, "channel_advantages": found.channel_advantages,
                "signal_gate": found.signal_gate, "direction_gate": found.direction_gate,
                "fallback": found.fallback}
    rewards = assigned.rewards_P_G_C
    shut = np.zeros(rewards.shape, bool)
    advantages = np.zeros(rewards.shape, np.float32)
    if method == "gdpo":
        advantages = np.asarray(credit.normalize_groups(rewards, levels.valid_P_G))
    fallback = np.where(rewards == 0, _NO_ATOMS, _NOT_SCORED).astype(np.int8)
    return {"rewards": rewards, "channel_advantages": advantages, "signal_gate": shut,
            "direction_gate": shut, "fallback": fallback}


def _rms(method, levels, assigned, config):
    if assigned.diagnostics is not None:
        return float(assigned.diagnostics.rms)
    if method != "gdpo":
        return None
    advantages = credit.normalize_groups(assigned.rewards_P_G_C, levels.valid_P_G)
    totals = credit.normalization.total_advantages(advantages, config.channel_weights)
    return float(credit.normalization.batch_rms(totals, levels.valid_P_G))


def _texts(tokenizer, rollouts, judgments):
    tokens, ends, responses = [], [], []
    for samples, row in zip(rollouts.samples, judgments, strict=True):
        for sample, judgment in zip(samples, row, strict=True):
            text, token_end = token_ends(tokenizer, sample.tokens)
            tokens.append(np.asarray(sample.tokens, np.int32))
            ends.append(np.asarray(token_end, np.int32))
            responses.append({"text": text, "finish_reason": sample.finish_reason} | (
                {} if judgment.valid else {"reason": judgment.reason}))
    return {"token_N": np.concatenate(tokens), "token_end_N": np.concatenate(ends),
            "responses": responses}


def _tokens(values, kept, dtype):
    if values is None:
        return None
    return np.asarray(values).reshape(kept.shape)[kept].astype(dtype)


def _pairs(assigned, scores, lengths, fallback_R_C):
    """Returns the scored pairs' differences and the localized ones' multipliers."""
    if scores is None:
        nothing = np.zeros(0, np.int32)
        return {"pair_response_S": nothing, "pair_channel_S": nothing,
                "difference": np.zeros(0, np.float32), "multiplier": np.zeros(0, np.float32)}
    full = scores.full_P_G_T.reshape(len(lengths), -1)
    ablated = scores.ablated_P_G_C_T.reshape(len(lengths), len(credit.CHANNELS), -1)
    multipliers = assigned.diagnostics.multipliers.reshape(ablated.shape)
    scored = scores.scored_P_G_C.reshape(len(lengths), -1)
    responses, channels = np.nonzero(scored)
    differences, moved = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)]
    for response, channel in zip(responses, channels):
        length = lengths[response]
        differences.append(full[response, :length] - ablated[response, channel, :length])
        if fallback_R_C[response, channel] == 0:
            moved.append(multipliers[response, channel, :length])
    return {"pair_response_S": responses.astype(np.int32),
            "pair_channel_S": channels.astype(np.int32),
            "difference": np.concatenate(differences), "multiplier": np.concatenate(moved)}
