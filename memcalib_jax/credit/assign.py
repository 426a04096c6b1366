"""Token advantages of MemCalib-RL: localized, mean-preserving (sections 3.2-3.3, D.4, H.2)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from memcalib_jax.credit.channels import CHANNELS, merge_overuse_rewards
from memcalib_jax.credit.localization import (
    MODES,
    aligned_signals,
    candidate_tokens,
    guarded_candidates,
    localization_signs,
    localize_sentences,
    localize_tokens,
)
from memcalib_jax.credit.normalization import (
    batch_rms,
    normalize_groups,
    total_advantages,
    weigh_channels,
)
from memcalib_jax.credit.projection import project_multipliers, proportional_multipliers
from memcalib_jax.credit.thresholds import SENTENCE_FLOOR, init_thresholds

GRANULARITIES = ("token", "sentence")

# Least value, greatest value, and whether nine values are allowed.
_RANGES = {
    "eta": (0.0, 1.0, True),
    "cap": (1.0, float("inf"), False),
    "max_difference": (0.0, float("inf"), False),
    "min_signal": (0.0, float("inf"), False),
    "coverage_power": (0.0, float("inf"), False),
    "min_sentence_signal": (0.0, float("inf"), False),
    "channel_weights": (0.0, float("inf"), True),
    "epsilon": (0.0, float("inf"), False),
    "min_std": (0.0, float("inf"), False),
}


@struct.dataclass
class CreditConfig:
    """Settings of the credit assignment; the defaults are those of arXiv 2609.24259.

    Numbers are pytree leaves, so that a sweep over them compiles once; `mode`, `granularity` and
    `merge_overuse` are static. `create` also checks the ranges of the numbers.

    Attributes:
      eta: strength of the redistribution, in [0, 1]; a scalar or one per channel.
      cap: greatest multiplier, at least 1.
      max_difference: signals are clipped to this, in nats.
      min_signal: a pair is localized only if a token's signal exceeds this, in nats.
      mode: which log-prob differences count, see `localization_signs`; "guarded" also which tokens
        may: those that a correctly used channel supports, and stop tokens, are no candidates of
        the under-use channels.
      granularity: "token" or "sentence" (H.2).
      coverage_power: exponent of a sentence's coverage (gamma of H.2).
      min_sentence_signal: as `min_signal`, for the greatest mean of a sentence, in nats.
      channel_weights: one weight per channel, applied to the normalized advantages; None for ones.
      merge_overuse: both over-use sets of Ignore atoms share the channel AB-; AC- stays empty.
      epsilon: added to each group's standard deviation and to the batch's mean square.
      min_std: a group whose standard deviation is under this has no signal.
    """

    eta: float | jax.Array = 0.75
    cap: float | jax.Array = 4.0
    max_difference: float | jax.Array = 3.0
    min_signal: float | jax.Array = 0.02
    mode: str = struct.field(pytree_node=False, default="ordered")
    granularity: str = struct.field(pytree_node=False, default="token")
    coverage_power: float | jax.Array = 1.0
    min_sentence_signal: float | jax.Array = 0.01
    channel_weights: jax.Array | None = None
    merge_overuse: bool = struct.field(pytree_node=False, default=False)
    epsilon: float | jax.Array = 1e-6
    min_std: float | jax.Array = 1e-6

    def __post_init__(self):
        for name, allowed in (("mode", MODES), ("granularity", GRANULARITIES)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )

    @classmethod
    def create(cls, **settings: Any) -> "CreditConfig":
        """Build a config from keyword settings and check their ranges.

        Raises:
          ValueError: a setting outside its range, of the wrong length, or an unknown name or
            choice; the message names it and says what is allowed.
        """
        unknown = sorted(set(settings) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(
                f"unknown setting {unknown[0]!r}; known are {', '.join(cls.__dataclass_fields__)}"
            )
        numbers = {name: value for name, value in settings.items() if name in _RANGES}
        checked = {name: _in_range(name, value) for name, value in numbers.items()}
        return cls(**{**settings, **checked})


def _in_range(name, value):
    if value is None and name == "channel_weights":
        return None
    low, high, per_channel = _RANGES[name]
    try:
        number = jnp.asarray(value, jnp.float32)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    shapes = [(len(CHANNELS),)] if per_channel else []
    if name != "channel_weights":
        shapes.append(())
    if number.shape not in shapes:
        allowed = " or ".join("a number" if not shape else "nine numbers" for shape in shapes)
        raise ValueError(f"{name} must be {allowed}, got shape {number.shape}")
    # Infinity is refused as well: it would turn products with 0 into NaN.
    if not bool(jnp.all(jnp.isfinite(number) & (number >= low) & (number <= high))):
        bound = f"in [{low:g}, {high:g}]" if high < float("inf") else f"finite, {low:g} or more"
        raise ValueError(f"{name} must be {bound}, got {value}")
    return number


@struct.dataclass
class CreditDiagnostics:
    """What the credit assignment saw and did, for metrics and `update_thresholds`.

    Attributes:
      scores: float32 [P, G, C, T], aligned, clipped log-prob differences in nats; 0 outside
        `score_mask`.
      score_mask: bool [P, G, C, T], the tokens of every scored pair of a valid response, gates shut
        or open; `update_thresholds` takes both.
      multipliers: float32 [P, G, C, T], mean 1 over each response; 1 where a pair is not localized,
        0 outside the response mask.
      localized: bool [P, G, C].
      signal_gate: bool [P, G, C], whether the signal is strong enough.
      direction_gate: bool [P, G, C], whether reward and advantage have the same sign.
      fallback: int8 [P, G, C], the first reason that applies: 0 localized, 1 no atoms (also every
        channel of an invalid response), 2 channel not localized, 3 not scored, 4 weak signal,
        5 zero score, 6 direction.
      channel_advantages: float32 [P, G, C], before weights and RMS; 0 for invalid responses.
      rms: float32 scalar, the batch's scale.
      sentence_scores: float32 [P, G, C, T], the mean score of sentence j at position j, in nats;
        None at token granularity.
      sentence_score_mask: bool [P, G, C, T], the sentences that exist in a scored pair; None at
        token granularity.
    """

    scores: jax.Array
    score_mask: jax.Array
    multipliers: jax.Array
    localized: jax.Array
    signal_gate: jax.Array
    direction_gate: jax.Array
    fallback: jax.Array
    channel_advantages: jax.Array
    rms: jax.Array
    sentence_scores: jax.Array | None = None
    sentence_score_mask: jax.Array | None = None


def memcalib_advantages(
    rewards_P_G_C: jax.Array,
    valid_P_G: jax.Array,
    full_log_probs_P_G_T: jax.Array,
    ablated_log_probs_P_G_C_T: jax.Array,
    scored_P_G_C: jax.Array,
    response_mask_P_G_T: jax.Array,
    thresholds_C: jax.Array,
    config: CreditConfig = CreditConfig(),
    *,
    sentence_ids_P_G_T: jax.Array | None = None,
    sentence_thresholds_C: jax.Array | None = None,
    stop_mask_P_G_T: jax.Array | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, CreditDiagnostics]:
    """Redistribute each channel's advantage over a response's tokens: Eq. (3), arXiv 2609.24259.

    A channel's advantage is its reward normalized within the group. Where its counterfactual is
    scored, strong enough and agrees in direction, the tokens it points at get more of it and the
    others less; the mean over the response stays. The sum over channels is divided by the RMS that
    GDPO divides by, so that each response's mean is its GDPO advantage.

    Args:
      rewards_P_G_C: float [P, G, C] from `channel_rewards`; 0 means that a channel has no atoms.
      valid_P_G: bool [P, G], responses with a judgment. Whatever belongs to an invalid one may be
        anything, NaN included.
      full_log_probs_P_G_T: float [P, G, T], nats, under the full prompt.
      ablated_log_probs_P_G_C_T: float [P, G, C, T], nats, of the same tokens under the prompt
        without the channel's atoms. Where not scored they may be anything, NaN included.
      scored_P_G_C: bool [P, G, C], which pairs have a counterfactual.
      response_mask_P_G_T: bool [P, G, T], made from lengths. Values outside may be anything.
      thresholds_C: float32 [C], nats, see `update_thresholds`.
      config: see `CreditConfig`. With `merge_overuse` the rewards of AC- are added to AB-, whose
        counterfactual is without the atoms of both (`channel_members(merge_overuse=True)`).
      sentence_ids_P_G_T: int [P, G, T], each token's sentence, 0 or more and under T; needed at
        sentence granularity.
      sentence_thresholds_C: float32 [C], nats; None for the initial 0.01.
      stop_mask_P_G_T: bool [P, G, T], stop tokens. They are no candidates of the under-use channels
        (BA-, CA-, CB-): the memory that speaks against ending speaks for more text, and a penalty
        on ending teaches rambling. They still take part in the mean and in the score pool. An
        addition to the paper; None leaves it out. Mode "guarded" needs it.
      axis_name: mapped axes (inside shard_map or vmap) over which the batch is spread.

    Returns:
      float32 [P, G, T] token advantages, 0 outside the mask and for invalid responses, and
      `CreditDiagnostics`.

    Raises:
      ValueError: shapes that do not fit together, sentence granularity without sentence ids, or
        mode "guarded" without stop tokens.
    """
    _check_shapes(
        rewards_P_G_C,
        valid_P_G=valid_P_G,
        full_log_probs_P_G_T=full_log_probs_P_G_T,
        ablated_log_probs_P_G_C_T=ablated_log_probs_P_G_C_T,
        scored_P_G_C=scored_P_G_C,
        response_mask_P_G_T=response_mask_P_G_T,
        thresholds_C=thresholds_C,
        sentence_ids_P_G_T=sentence_ids_P_G_T,
        sentence_thresholds_C=sentence_thresholds_C,
        stop_mask_P_G_T=stop_mask_P_G_T,
    )
    if config.mode == "guarded" and stop_mask_P_G_T is None:
        raise ValueError("mode 'guarded' needs stop_mask_P_G_T")
    valid = jnp.asarray(valid_P_G, bool)
    mask = jnp.asarray(response_mask_P_G_T, bool)
    rewards, advantages = _channel_advantages(rewards_P_G_C, valid, config)
    totals = total_advantages(advantages, config.channel_weights)
    rms = batch_rms(totals, valid, epsilon=config.epsilon, axis_name=axis_name)

    localizable = localization_signs(config.mode) != 0
    scored = jnp.asarray(scored_P_G_C, bool) & valid[..., None] & localizable
    score_mask = scored[..., None] & mask[..., None, :]
    signals = aligned_signals(
        full_log_probs_P_G_T, ablated_log_probs_P_G_C_T, score_mask, config.mode
    )
    clipped = jnp.clip(signals, -config.max_difference, config.max_difference)
    localize = functools.partial(
        _localize,
        signals,
        clipped,
        thresholds=jnp.asarray(thresholds_C, jnp.float32),
        config=config,
        sentence_ids=sentence_ids_P_G_T,
        sentence_thresholds=sentence_thresholds_C,
    )
    candidates = candidate_tokens(score_mask, stop_mask_P_G_T)
    found = localize(candidates)
    if config.mode == "guarded":
        guarded = localize(guarded_candidates(candidates, found.scores))
        # The pool that thresholds move on stays that of "ordered".
        found = found._replace(scores=guarded.scores, signal_gate=guarded.signal_gate)

    direction_gate = _same_direction(rewards, advantages)
    fallback = jnp.select(
        [
            rewards == 0,
            jnp.broadcast_to(~localizable, rewards.shape),
            ~scored,
            ~found.signal_gate,
            ~jnp.any(found.scores > 0, axis=-1),
            ~direction_gate,
        ],
        [jnp.int8(code) for code in range(1, 7)],
        jnp.int8(0),
    )
    localized = fallback == 0
    localized_mask = localized[..., None] & score_mask
    multipliers = project_multipliers(
        proportional_multipliers(found.scores, localized_mask), localized_mask, cap=config.cap
    )

    # Apart from the uniform part, so that the mean does not hang on how eta and 1 - eta round.
    strength = weigh_channels(advantages, config.channel_weights) * jnp.asarray(
        config.eta, jnp.float32
    )
    moved = jnp.where(localized_mask, strength[..., None] * (multipliers - 1.0), 0.0)
    token_advantages = (totals[..., None] + jnp.sum(moved, axis=-2)) / rms
    token_advantages = jnp.where(mask & valid[..., None], token_advantages, 0.0)
    return token_advantages, CreditDiagnostics(
        scores=clipped,
        score_mask=score_mask,
        multipliers=jnp.where(localized[..., None], multipliers, mask[..., None, :]),
        localized=localized,
        signal_gate=found.signal_gate,
        direction_gate=direction_gate,
        fallback=fallback,
        channel_advantages=advantages,
        rms=rms,
        sentence_scores=found.sentence_means,
        sentence_score_mask=found.sentence_mask,
    )


def open_directions(rewards_P_G_C, valid_P_G, config: CreditConfig = CreditConfig()) -> jax.Array:
    """Return where reward and advantage have the same sign: the direction gate before any scoring.

    Elsewhere a channel's advantage stays uniform over the tokens whatever its counterfactual says
    (Section 3.3, arXiv 2609.24259), so that its score can only move the thresholds.

    Args:
      rewards_P_G_C: float [P, G, C] channel rewards.
      valid_P_G: bool [P, G]; invalid responses are closed.
      config: constants.

    Returns:
      bool [P, G, C], the `direction_gate` of `memcalib_advantages`.
    """
    valid = jnp.asarray(valid_P_G, bool)
    return _same_direction(*_channel_advantages(rewards_P_G_C, valid, config))


def _channel_advantages(rewards, valid, config):
    rewards = jnp.where(valid[..., None], jnp.asarray(rewards, jnp.float32), 0.0)
    if config.merge_overuse:
        rewards = merge_overuse_rewards(rewards)
    return rewards, normalize_groups(
        rewards, valid, epsilon=config.epsilon, min_std=config.min_std
    )


def _same_direction(rewards, advantages):
    return (rewards != 0) & (jnp.sign(rewards) == jnp.sign(advantages))


def _localize(signals, clipped, candidates, thresholds, config, sentence_ids, sentence_thresholds):
    if config.granularity == "token":
        return localize_tokens(
            signals, clipped, candidates, thresholds, min_signal=config.min_signal
        )
    if sentence_ids is None:
        raise ValueError("granularity 'sentence' needs sentence_ids_P_G_T")
    if sentence_thresholds is None:
        sentence_thresholds = init_thresholds(initial=SENTENCE_FLOOR)
    return localize_sentences(
        signals,
        clipped,
        candidates,
        jnp.asarray(sentence_ids, jnp.int32),
        thresholds,
        jnp.asarray(sentence_thresholds, jnp.float32),
        min_signal=config.min_signal,
        min_sentence_signal=config.min_sentence_signal,
        coverage_power=config.coverage_power,
    )


def _check_shapes(rewards, **arrays):
    """Refuse arrays whose axes, named by the suffix, differ from the rewards' and the mask's."""
    if jnp.ndim(rewards) != 3 or jnp.shape(rewards)[-1] != len(CHANNELS):
        raise ValueError(
            f"rewards_P_G_C must be [prompts, responses, {len(CHANNELS)}], "
            f"got {list(jnp.shape(rewards))}"
        )
    sizes = dict(zip("PGC", jnp.shape(rewards)))
    sizes["T"] = (jnp.shape(arrays["response_mask_P_G_T"]) or (0,))[-1]
    for name, array in arrays.items():
        axes = [part for part in name.split("_") if part in sizes]
        expected = [sizes[axis] for axis in axes]
        if array is not None and list(jnp.shape(array)) != expected:
            raise ValueError(f"{name} must have shape {expected}, got {list(jnp.shape(array))}")
