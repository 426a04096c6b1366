"""From judged rollouts to token advantages: the shell around the pure functions of `credit`."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from memcalib_jax import credit
from memcalib_jax.credit.thresholds import (
    SENTENCE_FLOOR, SENTENCE_MIN_COUNT, SENTENCE_QUANTILE)
from memcalib_jax.data import Record, ablate, render, sentence_ids
from memcalib_jax.judge import Judgment
from memcalib_jax.models.on_mesh import constrained, rows_spec, whole
from memcalib_jax.scoring import ScoringGroup
from memcalib_jax.scoring.counterfactual import pack_groups, score_packing
from memcalib_jax.scoring.packing import Packing, bucket
from memcalib_jax.training.rollouts import Policy, Rollouts, SamplingConfig

METHODS = ("memcalib", "gdpo", "grpo")
NUM_CHANNELS = len(credit.CHANNELS)

# The noise floor is measured on one response of each of the first few prompts of a step: one
# prompt in so many, and no more than enough.
NOISE_SHARE = 8
NOISE_PROMPTS = 8
NOISE_POSITION_SHIFT = 17


@dataclasses.dataclass(frozen=True)
class JudgedLevels:
    """Use levels as arrays; rows of atoms are padded to one size.

    Attributes:
      ideal_P_G_A, actual_P_G_A: int32 levels, 0 where `atom_mask_P_G_A` is false.
      atom_mask_P_G_A: bool, true at atoms of responses with a valid judgment.
      valid_P_G: bool, the response has a valid judgment.
    """

    ideal_P_G_A: np.ndarray
    actual_P_G_A: np.ndarray
    atom_mask_P_G_A: np.ndarray
    valid_P_G: np.ndarray


def judged_levels(records: Sequence[Record],
                  judgments: Sequence[Sequence[Judgment]]) -> JudgedLevels:
    """Lays the judgments of each record's responses, `[P][G]`, out as arrays."""
    most = max(len(record.atoms) for record in records)
    shape = (len(judgments), len(judgments[0]), bucket(most, 8))
    ideal, actual = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    mask, valid = np.zeros(shape, bool), np.zeros(shape[:2], bool)
    for p, (record, row) in enumerate(zip(records, judgments, strict=True)):
        for g, judgment in enumerate(row):
            if judgment.valid:
                count = len(record.atoms)
                valid[p, g], mask[p, g, :count] = True, True
                ideal[p, g, :count] = [atom.ideal for atom in record.atoms]
                actual[p, g, :count] = judgment.levels
    return JudgedLevels(ideal, actual, mask, valid)


@dataclasses.dataclass(frozen=True)
class ScoringConfig:
    """How counterfactuals are scored.

    Attributes:
      dtype: of the products.
      representation: how the prompts word their memories, "atomic" or "fluent".
      closed_gate_fraction: share of the pairs with a shut direction gate that is scored, drawn
        anew each step. Their scores move no token's advantage, but the thresholds' pools.
    """

    dtype: str = "bfloat16"
    representation: str = "atomic"
    closed_gate_fraction: float = 1.0


@dataclasses.dataclass(frozen=True)
class Counterfactuals:
    """Log-probs of the responses under full and ablated prompts, in nats.

    Attributes:
      full_P_G_T: float32, under the full prompt.
      ablated_P_G_C_T: float32, without the channel's atoms; 0 where `scored_P_G_C` is false.
      scored_P_G_C: bool.
      noise: root mean square of the full prompt's log-probs minus those of its twin at shifted
        positions: the size of a difference that means nothing.
      groups: what was scored; `log_probs` of their pairs; `packing` says how.
    """

    full_P_G_T: np.ndarray
    ablated_P_G_C_T: np.ndarray
    scored_P_G_C: np.ndarray
    noise: float
    groups: list[ScoringGroup]
    log_probs: list[list[np.ndarray]]
    packing: Packing


def pairs_to_score(levels: JudgedLevels, credit_config: credit.CreditConfig,
                   closed_gate_fraction: float, key: jax.Array) -> np.ndarray:
    """Returns which (response, channel) pairs need a counterfactual, bool `[P, G, C]`.

    Every non-empty localizable channel of a valid response; of those whose direction gate is shut
    only the share `closed_gate_fraction`, drawn with `key`.
    """
    members = _members(levels, credit_config)
    localizable = np.asarray(credit.localization_signs(credit_config.mode)) != 0
    wanted = members.any(-1) & localizable & levels.valid_P_G[..., None]
    if closed_gate_fraction >= 1:
        return wanted
    is_open = np.asarray(_open_directions(
        channel_rewards(levels), levels.valid_P_G, credit_config))
    drawn = np.asarray(jax.random.uniform(key, wanted.shape)) < closed_gate_fraction
    return wanted & (is_open | drawn)


def _members(levels: JudgedLevels, credit_config: credit.CreditConfig) -> np.ndarray:
    return np.asarray(credit.channel_members(
        levels.ideal_P_G_A, levels.actual_P_G_A, levels.atom_mask_P_G_A,
        merge_overuse=credit_config.merge_overuse))


def score_channels(policy: Policy, rollouts: Rollouts, levels: JudgedLevels,
                   scored_P_G_C: np.ndarray, credit_config: credit.CreditConfig,
                   sampling: SamplingConfig, representation: str,
                   sizes: Sequence[int]) -> Counterfactuals:
    """Scores every valid response in full, and without each channel's atoms where `scored`.

    Args:
      policy: the model that sampled the responses, in the scoring dtype.
      rollouts, levels: responses and their judged levels.
      scored_P_G_C: bool, see `pairs_to_score`.
      credit_config: says which atoms a channel holds.
      sampling: how the responses were drawn.
      representation: how the prompts word their memories.
      sizes: sizes that bins may have, see `pack`.
    """
    members = _members(levels, credit_config)
    groups, targets = [], []
    for p in range(len(rollouts.prompts)):
        group, target = _group(policy, rollouts, p, levels.valid_P_G[p], scored_P_G_C[p],
                               members[p], representation)
        groups.append(group)
        targets.append(target)
    packing = pack_groups(policy.config, groups, sizes)
    log_probs = score_packing(policy.params, policy.config, packing, sampling.temperature)

    full = np.zeros((*levels.valid_P_G.shape, sampling.max_tokens), np.float32)
    ablated = np.zeros((*levels.valid_P_G.shape, NUM_CHANNELS, sampling.max_tokens), np.float32)
    differences = []
    for p, (rows, target) in enumerate(zip(log_probs, targets)):
        for row, (g, channel) in zip(rows, target):
            if channel == _FULL:
                full[p, g, :len(row)] = row
            elif channel == _TWIN:
                differences.append(row - full[p, g, :len(row)])
            else:
                ablated[p, g, channel, :len(row)] = row
    noise = float(np.sqrt(np.mean(np.square(np.concatenate(differences))))) if differences else 0.0
    return Counterfactuals(full, ablated, scored_P_G_C, noise, groups, log_probs, packing)


_FULL, _TWIN = -1, -2


def _group(policy, rollouts, p, valid_G, scored_G_C, members_G_C_A, representation):
    """Returns a prompt's scoring group and, for each pair, (response, channel, _FULL or _TWIN)."""
    prompt = rollouts.prompts[p]
    prompts, offsets, pairs, targets = [prompt.tokens], [0], [], []
    variants: dict[frozenset, int] = {}

    def variant(atom_ids: frozenset) -> int:
        if atom_ids not in variants:
            variants[atom_ids] = len(prompts)
            messages = ablate(prompt.record, atom_ids, representation=representation)
            prompts.append(render(policy.tokenizer, messages))
            offsets.append(0)
        return variants[atom_ids]

    for g in np.flatnonzero(valid_G):
        pairs.append((0, g))
        targets.append((g, _FULL))
        for channel in np.flatnonzero(scored_G_C[g]):
            removed = np.flatnonzero(members_G_C_A[g, channel])
            pairs.append((variant(frozenset(prompt.record.atoms[a].id for a in removed)), g))
            targets.append((g, channel))
    if p < min(NOISE_PROMPTS, -(-len(rollouts.prompts) // NOISE_SHARE)) and valid_G.any():
        pairs.append((len(prompts), pairs[0][1]))
        targets.append((pairs[0][1], _TWIN))
        prompts.append(prompt.tokens)
        offsets.append(NOISE_POSITION_SHIFT)
    responses = [sample.tokens for sample in rollouts.samples[p]]
    return ScoringGroup(prompts, responses, pairs, offsets), targets



@jax.jit
def _memcalib(rewards, valid, scores, mask, thresholds, config, sentence_ids, sentence_thresholds,
              stop_mask):
    """Returns advantages, diagnostics and both next thresholds, in one program.

    On a mesh each device has its share of the prompts; a threshold's pool is never gathered.
    """
    by_sentence = config.granularity == "sentence"
    prompts = rows_spec(len(rewards))
    rewards, valid, scores, mask, sentence_ids = jax.tree.map(
        lambda x: constrained(x, prompts), (rewards, valid, scores, mask, sentence_ids))
    advantages, diagnostics = credit.memcalib_advantages(
        rewards, valid, *scores, mask, thresholds, config, sentence_ids_P_G_T=sentence_ids,
        sentence_thresholds_C=sentence_thresholds if by_sentence else None,
        stop_mask_P_G_T=stop_mask)
    thresholds = credit.update_thresholds(thresholds, diagnostics.scores, diagnostics.score_mask)
    if by_sentence:
        sentence_thresholds = credit.update_thresholds(
            sentence_thresholds, diagnostics.sentence_scores, diagnostics.sentence_score_mask,
            quantile=SENTENCE_QUANTILE, floor=SENTENCE_FLOOR, min_count=SENTENCE_MIN_COUNT)
    return whole((advantages, diagnostics, thresholds, sentence_thresholds))


_rewards = jax.jit(credit.channel_rewards)
_open_directions = jax.jit(credit.open_directions)
_grpo = jax.jit(credit.grpo_advantages)
_gdpo = jax.jit(credit.gdpo_advantages)


def response_mask(rollouts: Rollouts, max_tokens: int) -> np.ndarray:
    """Returns the bool `[P, G, T]` mask of response tokens, from their lengths."""
    lengths = np.array([[len(s.tokens) for s in row] for row in rollouts.samples])
    return np.arange(max_tokens) < lengths[..., None]


def stop_mask(rollouts: Rollouts, max_tokens: int) -> np.ndarray:
    """Returns the bool `[P, G, T]` mask of the tokens that ended their responses."""
    ends = np.array([[len(s.tokens) if s.finish_reason == "stop" else 0 for s in row]
                     for row in rollouts.samples])
    return np.arange(1, max_tokens + 1) == ends[..., None]


@dataclasses.dataclass(frozen=True)
class Credit:
    """What a step's judgments mean for its tokens.

    Attributes:
      rewards_P_G_C: float32 channel rewards, 0 for invalid responses.
      advantages_P_G_T: float32 token advantages, 0 outside valid responses.
      thresholds_C, sentence_thresholds_C: float32, after this batch; None where the method, or
        the granularity, has none.
      diagnostics: `CreditDiagnostics` on the host; None where the method has none.
    """

    rewards_P_G_C: np.ndarray
    advantages_P_G_T: np.ndarray
    thresholds_C: jax.Array | None = None
    sentence_thresholds_C: jax.Array | None = None
    diagnostics: credit.CreditDiagnostics | None = None


def channel_rewards(levels: JudgedLevels) -> np.ndarray:
    """Returns the float32 `[P, G, C]` rewards."""
    return np.asarray(_rewards(levels.ideal_P_G_A, levels.actual_P_G_A, levels.atom_mask_P_G_A))


def uniform_credit(method: str, levels: JudgedLevels, mask_P_G_T: np.ndarray,
                   config: credit.CreditConfig) -> Credit:
    """Assigns GRPO's or GDPO's response advantage to every token (D.2, arXiv 2609.24259)."""
    rewards = channel_rewards(levels)
    assign = {"grpo": _grpo, "gdpo": _gdpo}[method]
    advantages = assign(rewards, levels.valid_P_G, channel_weights=config.channel_weights)
    spread = np.where(mask_P_G_T, np.asarray(advantages)[..., None], 0.0)
    return Credit(rewards, spread.astype(np.float32))


def sentence_ids_of(tokenizer, rollouts: Rollouts, max_tokens: int) -> np.ndarray:
    """Returns the sentence of each response token, int32 `[P, G, T]`; 0 behind the responses."""
    ids = np.zeros((len(rollouts.samples), len(rollouts.samples[0]), max_tokens), np.int32)
    for row, samples in zip(ids, rollouts.samples):
        for sentence_row, sample in zip(row, samples):
            sentence_row[:len(sample.tokens)] = sentence_ids(tokenizer, sample.tokens)
    return ids


def localized_credit(levels: JudgedLevels, scores: Counterfactuals, mask_P_G_T: np.ndarray,
                     thresholds_C: jax.Array, config: credit.CreditConfig,
                     sentence_ids_P_G_T: np.ndarray | None = None,
                     sentence_thresholds_C: jax.Array | None = None,
                     stop_mask_P_G_T: np.ndarray | None = None) -> Credit:
    """Moves each channel's advantage to the tokens that its atoms changed, and the thresholds.

    Section 3, D.3-D.4 and H.2, arXiv 2609.24259. One batch uses one threshold; it moves
    afterwards. Sentence ids are for sentence granularity, which needs them, stop tokens for
    guarded localization, which sees the support of those pairs alone that are scored.
    """
    rewards = channel_rewards(levels)
    advantages, diagnostics, thresholds, sentence_thresholds = _memcalib(
        rewards, levels.valid_P_G,
        (scores.full_P_G_T, scores.ablated_P_G_C_T, scores.scored_P_G_C), mask_P_G_T,
        thresholds_C, config, sentence_ids_P_G_T, sentence_thresholds_C, stop_mask_P_G_T)
    advantages, diagnostics = jax.device_get((advantages, diagnostics))
    return Credit(rewards, advantages, thresholds, sentence_thresholds, diagnostics)
