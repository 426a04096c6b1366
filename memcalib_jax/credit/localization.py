"""Where in a response a channel's credit belongs (section 3.2 and H.2, arXiv 2609.24259).

Signals are differences of log-probs in nats: full prompt minus the prompt without a channel's
atoms, aligned with the sign that the channel looks for.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcalib_jax.credit.channels import channel_levels

# 0: not localized. "absolute" takes |d|, the others sign * d.
_SIGNS = {
    "ordered": (0, 1, 1, -1, 1, 1, -1, -1, 1),
    "absolute": (0, 1, 1, 1, 1, 1, 1, 1, 1),
    "positive_only": (0, 1, 1, 0, 1, 1, 0, 1, 1),
    "guarded": (0, 1, 1, -1, 1, 1, -1, -1, 1),
}
MODES = tuple(_SIGNS)


class Localization(NamedTuple):
    """What one channel's signals say about a response.

    Attributes:
      scores: float32 [..., C, T], non-negative: how much of the credit each token draws.
      signal_gate: bool [..., C], whether the signal is strong enough to localize at all.
      sentence_means: float32 [..., C, T], mean clipped signal of sentence j at position j; None at
        token granularity.
      sentence_mask: bool [..., C, T], which of them exist; None at token granularity.
    """

    scores: jax.Array
    signal_gate: jax.Array
    sentence_means: jax.Array | None = None
    sentence_mask: jax.Array | None = None


def localization_signs(mode: str = "ordered") -> jax.Array:
    """Return the sign of the log-prob difference that each channel looks for (section 3.2).

    Args:
      mode: "ordered" (over-use and right use look for support, +1; under-use for suppression, -1),
        "absolute" (all look for |d|, H.2), "positive_only" (+1, and BA- and CA- are not
        localized) or "guarded" (the signs of "ordered"; see `guarded_candidates`).

    Returns:
      float32 [C]; 0 where a channel is not localized.

    Raises:
      ValueError: an unknown mode.
    """
    if mode not in _SIGNS:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    return jnp.array(_SIGNS[mode], jnp.float32)


def aligned_signals(
    full_T: jax.Array, ablated_C_T: jax.Array, mask_C_T: jax.Array, mode: str
) -> jax.Array:
    """Return `z = s d` (or `|d|`) in nats, float32 [..., C, T]; 0 outside the mask."""
    full = jnp.where(mask_C_T, jnp.asarray(full_T, jnp.float32)[..., None, :], 0.0)
    ablated = jnp.where(mask_C_T, jnp.asarray(ablated_C_T, jnp.float32), 0.0)
    difference = full - ablated
    if mode == "absolute":
        difference = jnp.abs(difference)
    return jnp.where(mask_C_T, localization_signs(mode)[:, None] * difference, 0.0)


def candidate_tokens(mask_C_T: jax.Array, stop_mask_T: jax.Array | None) -> jax.Array:
    """Leave stop tokens out of the under-use channels' candidates.

    Under-use channels look for text that a memory argued against. That a memory argues against
    ending says only that more was to be said: punishing the stop token for it teaches rambling.
    """
    if stop_mask_T is None:
        return mask_C_T
    return _without(mask_C_T, jnp.asarray(stop_mask_T, bool))


def guarded_candidates(candidates_C_T: jax.Array, scores_C_T: jax.Array) -> jax.Array:
    """Leave what a correctly used channel supports out of the under-use channels' candidates.

    A token is supported where its score in B+ or C+ of the same response is positive: at token
    granularity its own clipped difference is above that channel's threshold, at sentence
    granularity its sentence's mean is above the sentence threshold, so that a sentence is left out
    whole. An atom that is missing may well argue against a token that another atom rightly put
    there, and such a token is no fault of the response. An addition to the paper.
    """
    ideal_C, actual_C = channel_levels()
    right = (ideal_C == actual_C)[:, None]
    return _without(candidates_C_T, jnp.any(right & (scores_C_T > 0), axis=-2))


def _without(candidates_C_T, barred_T):
    """Takes tokens from the candidates of the under-use channels."""
    ideal_C, actual_C = channel_levels()
    under_use = (actual_C < ideal_C)[:, None]
    return candidates_C_T & ~(under_use & barred_T[..., None, :])


def localize_tokens(
    signals_C_T: jax.Array,
    clipped_C_T: jax.Array,
    candidates_C_T: jax.Array,
    thresholds_C: jax.Array,
    *,
    min_signal: float,
) -> Localization:
    """Score tokens: `q = G relu(clip(z) - delta)`, section 3.2, arXiv 2609.24259.

    The gate `G` compares the strongest unclipped signal with `min_signal`, strictly.
    """
    strongest = jnp.max(jnp.where(candidates_C_T, signals_C_T, -jnp.inf), axis=-1, initial=-jnp.inf)
    above = jax.nn.relu(clipped_C_T - thresholds_C[:, None])
    return Localization(jnp.where(candidates_C_T, above, 0.0), strongest > min_signal)


def localize_sentences(
    signals_C_T: jax.Array,
    clipped_C_T: jax.Array,
    candidates_C_T: jax.Array,
    sentence_ids_T: jax.Array,
    thresholds_C: jax.Array,
    sentence_thresholds_C: jax.Array,
    *,
    min_signal: float,
    min_sentence_signal: float,
    coverage_power: float,
) -> Localization:
    """Score sentences and share each score equally among its tokens (H.2, arXiv 2609.24259).

    `q_j = relu(a_j - delta_sent) c_j^gamma` with `a_j` the sentence's mean clipped signal and `c_j`
    the share of its tokens whose unclipped signal exceeds the token threshold. Each token's score
    is `q_j / L_j`, so that multipliers in proportion to scores are H.2's `T w_j / L_j`. A token
    that is no candidate counts for no sentence.
    """
    sums = _sum_by_sentence(
        jnp.stack(
            [
                jnp.where(candidates_C_T, clipped_C_T, 0.0),
                candidates_C_T & (signals_C_T > thresholds_C[:, None]),
                candidates_C_T,
            ],
            axis=-1,
        ),
        sentence_ids_T,
    )
    total, covered, length = sums[..., 0], sums[..., 1], sums[..., 2]
    exists = length > 0
    length = jnp.where(exists, length, 1.0)
    means = total / length
    above = jax.nn.relu(means - sentence_thresholds_C[:, None])
    per_token = above * (covered / length) ** coverage_power / length

    ids_C_T = jnp.broadcast_to(sentence_ids_T[..., None, :], per_token.shape)
    scores = jnp.take_along_axis(per_token, ids_C_T, axis=-1, mode="clip")
    strongest = jnp.max(jnp.where(candidates_C_T, signals_C_T, -jnp.inf), axis=-1, initial=-jnp.inf)
    strongest_mean = jnp.max(jnp.where(exists, means, -jnp.inf), axis=-1, initial=-jnp.inf)
    return Localization(
        scores=jnp.where(candidates_C_T, scores, 0.0),
        signal_gate=(strongest > min_signal) & (strongest_mean > min_sentence_signal),
        sentence_means=jnp.where(exists, means, 0.0),
        sentence_mask=exists,
    )


def _sum_by_sentence(values_C_T_K: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Sum over the tokens of each sentence: [..., C, T, K] to [..., C, T, K], sentence j at j."""
    length = ids_T.shape[-1]

    def one_response(values, ids):
        by_token = jnp.moveaxis(values, 1, 0)
        return jnp.moveaxis(jax.ops.segment_sum(by_token, ids, length), 0, 1)

    flat_values = values_C_T_K.reshape((-1,) + values_C_T_K.shape[-3:])
    sums = jax.vmap(one_response)(flat_values, ids_T.reshape(-1, length))
    return sums.reshape(values_C_T_K.shape)
