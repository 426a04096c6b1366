"""From judged rollouts to token advantages: the shell around the pure functions of `credit`."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from memcalib_jax import credit
from memcalib_jax.data import Record, ablate, render
from memcalib_jax.judge import Judgment
from memcalib_jax.scoring import ScoringGroup
from memcalib_jax.scoring.counterfactual import branch_multiple, pack_groups, score_packing
from memcalib_jax.scoring.packing import bucket
from memcalib_jax.training.rollouts import Policy, Rollouts

METHODS = ("memcalib", "gdpo", "grpo")
NUM_CHANNELS = len(credit.CHANNELS)

# The noise floor is measured on one response of each of the first few prompts of a step.
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
class Counterfactuals:
    """Log-probs of the responses under full and ablated prompts, in nats.

    Attributes:
      full_P_G_T: float32, under the full prompt.
      ablated_P_G_C_T: float32, without the channel's atoms; 0 where `scored_P_G_C` is false.
      scored_P_G_C: bool.
      noise: root mean square of the full prompt's log-probs minus those of its twin at shifted
        positions: the size of a difference that means nothing.
      dense_tokens, tree_tokens, padded_tokens: as in `Packing`.
    """

    full_P_G_T: np.ndarray
    ablated_P_G_C_T: np.ndarray
    scored_P_G_C: np.ndarray
    noise: float
    dense_tokens: int
    tree_tokens: int
    padded_tokens: int


def score_channels(policy: Policy, rollouts: Rollouts, levels: JudgedLevels, *, mode: str,
                   temperature: float, representation: str, max_tokens: int,
                   bin_tokens: int) -> Counterfactuals:
    """Scores every valid response in full and without each non-empty localizable channel.

    Args:
      policy: the model that sampled the responses, in the scoring dtype.
      rollouts, levels: responses and their judged levels.
      mode: the localization mode; channels whose sign is 0 in it are not scored.
      temperature: of the rollouts.
      representation: how the prompts word their memories.
      max_tokens: room for response tokens, T.
      bin_tokens: tokens of one device call's bin.
    """
    members = np.asarray(credit.channel_members(
        levels.ideal_P_G_A, levels.actual_P_G_A, levels.atom_mask_P_G_A))
    localizable = np.asarray(credit.localization_signs(mode)) != 0
    scored = members.any(-1) & localizable & levels.valid_P_G[..., None]

    groups, targets = [], []
    for p in range(len(rollouts.prompts)):
        group, target = _group(policy, rollouts, p, levels.valid_P_G[p], scored[p], members[p],
                               representation)
        groups.append(group)
        targets.append(target)
    packing = pack_groups(groups, bin_tokens=bin_tokens,
                          branch_multiple=branch_multiple(policy.config))
    log_probs = score_packing(policy.params, policy.config, packing, temperature)

    full = np.zeros((*levels.valid_P_G.shape, max_tokens), np.float32)
    ablated = np.zeros((*levels.valid_P_G.shape, NUM_CHANNELS, max_tokens), np.float32)
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
    return Counterfactuals(full, ablated, scored, noise, packing.dense_tokens,
                           packing.tree_tokens, packing.padded_tokens)


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
    if p < NOISE_PROMPTS and valid_G.any():
        pairs.append((len(prompts), pairs[0][1]))
        targets.append((pairs[0][1], _TWIN))
        prompts.append(prompt.tokens)
        offsets.append(NOISE_POSITION_SHIFT)
    responses = [sample.tokens for sample in rollouts.samples[p]]
    return ScoringGroup(prompts, responses, pairs, offsets), targets


_memcalib = jax.jit(credit.memcalib_advantages)
_update_thresholds = jax.jit(credit.update_thresholds)
_rewards = jax.jit(credit.channel_rewards)
_grpo = jax.jit(credit.grpo_advantages)
_gdpo = jax.jit(credit.gdpo_advantages)


def response_mask(rollouts: Rollouts, max_tokens: int) -> np.ndarray:
    """Returns the bool `[P, G, T]` mask of response tokens, from their lengths."""
    lengths = np.array([[len(s.tokens) for s in row] for row in rollouts.samples])
    return np.arange(max_tokens) < lengths[..., None]


@dataclasses.dataclass(frozen=True)
class Credit:
    """What a step's judgments mean for its tokens.

    Attributes:
      rewards_P_G_C: float32 channel rewards, 0 for invalid responses.
      advantages_P_G_T: float32 token advantages, 0 outside valid responses.
      thresholds_C: float32, after this batch; None where the method has none.
      diagnostics: `CreditDiagnostics` on the host; None where the method has none.
    """

    rewards_P_G_C: np.ndarray
    advantages_P_G_T: np.ndarray
    thresholds_C: jax.Array | None = None
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


def localized_credit(levels: JudgedLevels, scores: Counterfactuals, mask_P_G_T: np.ndarray,
                     thresholds_C: jax.Array, config: credit.CreditConfig) -> Credit:
    """Moves each channel's advantage to the tokens that its atoms changed, and the thresholds.

    Section 3 and D.3-D.4, arXiv 2609.24259. One batch uses one threshold; it moves afterwards.
    """
    rewards = channel_rewards(levels)
    advantages, diagnostics = _memcalib(
        rewards, levels.valid_P_G, scores.full_P_G_T, scores.ablated_P_G_C_T,
        scores.scored_P_G_C, mask_P_G_T, thresholds_C, config)
    thresholds = _update_thresholds(thresholds_C, diagnostics.scores, diagnostics.score_mask)
    advantages, diagnostics = jax.device_get((advantages, diagnostics))
    return Credit(rewards, advantages, thresholds, diagnostics)
