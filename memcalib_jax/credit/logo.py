"""Step-level policy optimization with global and local groups: LoGo-GRPO, Memory-R2, 3.2 and 3.3.

A step is one generation of one role. Its group says whom it is compared with: the trajectories of
one conversation, session and role, or the rerolls of one session from one and the same bank.
"""

import jax
import jax.numpy as jnp

# A log-ratio of tokens to the reference beyond this could overflow its exponential.
_MAX_KL_LOG_RATIO = 10.0

LEVELS = ("step", "token")


def logo_advantages(
    rewards_N: jax.Array,
    group_ids_N: jax.Array,
    valid_N: jax.Array,
    *,
    num_groups: int,
    epsilon: float = 1e-6,
    ddof: int = 1,
) -> jax.Array:
    """Turn rewards into z-scores of their group: `(r - mean) / (std + epsilon)`, section 3.3.

    Global and local groups are of one kind here: they differ in their ids alone, and a member is
    compared with nobody outside its own. Members may stand in any order.

    Args:
      rewards_N: float [N]. Those of invalid members may be anything, NaN included.
      group_ids_N: int [N], in [0, num_groups).
      valid_N: bool [N].
      num_groups: how many groups there may be (static); some may be empty.
      epsilon: added to the standard deviation.
      ddof: 1: the unbiased deviation; 0: the population's.

    Returns:
      float32 [N]: 0 for invalid members, for ids outside the range and in groups of fewer than
      two valid members; exactly 0 where all valid rewards of a group are equal.

    Raises:
      ValueError: shapes differ, or a number is out of range.
    """
    rewards, groups = jnp.asarray(rewards_N, jnp.float32), jnp.asarray(group_ids_N, jnp.int32)
    valid = jnp.asarray(valid_N, bool)
    if rewards.ndim != 1 or not rewards.shape == groups.shape == valid.shape:
        raise ValueError(
            "rewards, group ids and valid must be [N] each, got "
            f"{list(rewards.shape)}, {list(groups.shape)} and {list(valid.shape)}")
    if num_groups < 1 or ddof not in (0, 1):
        raise ValueError(
            f"num_groups must be at least 1 and ddof 0 or 1, got {num_groups} and {ddof}")
    if not rewards.size:
        return rewards
    valid &= (groups >= 0) & (groups < num_groups)
    # One group more takes the invalid ones.
    groups = jnp.where(valid, groups, num_groups)
    rewards = jnp.where(valid, rewards, 0.0)

    def of_group(values, reduce=jax.ops.segment_sum):
        return reduce(values, groups, num_segments=num_groups + 1)[groups]

    # Differences to one member are exactly 0 in a constant group; a float32 mean may not be.
    first = of_group(jnp.arange(rewards.size), jax.ops.segment_min)
    relative = jnp.where(valid, rewards - rewards[first], 0.0)
    count = jnp.maximum(of_group(valid.astype(jnp.float32)), 1.0)
    deviation = relative - of_group(relative) / count
    variance = of_group(jnp.where(valid, jnp.square(deviation), 0.0)) / jnp.maximum(
        count - ddof, 1.0)
    varies = valid & (count >= 2) & (variance > 0)
    std = jnp.sqrt(jnp.where(varies, variance, 1.0))
    return jnp.where(varies, deviation / (std + epsilon), 0.0)


def step_ratios(
    log_probs_S_T: jax.Array,
    old_log_probs_S_T: jax.Array,
    mask_S_T: jax.Array,
    *,
    max_log_ratio: float = 3.0,
) -> jax.Array:
    """Return each step's ratio, the geometric mean of its tokens' ratios, section 3.2.

    A step of 5 tokens and one of 500 move by the same amount where their tokens do.

    Args:
      log_probs_S_T: float [S, T], log pi of the sampled tokens, nats; carries the gradient.
      old_log_probs_S_T: float [S, T], nats.
      mask_S_T: bool [S, T], true at the step's tokens; elsewhere anything may stand, NaN included.
      max_log_ratio: a step's mean log-ratio is cut at this (nats).

    Returns:
      float32 [S]; 1 for a step without tokens.

    Raises:
      ValueError: shapes differ.
    """
    log_ratios, mask = _log_ratios(log_probs_S_T, old_log_probs_S_T, mask_S_T)
    return jnp.exp(jnp.minimum(_step_means(log_ratios, mask), max_log_ratio))


def logo_loss(
    log_probs_S_T: jax.Array,
    old_log_probs_S_T: jax.Array,
    reference_log_probs_S_T: jax.Array,
    advantages_S: jax.Array,
    mask_S_T: jax.Array,
    *,
    clip: float = 0.2,
    dual_clip: float = 3.0,
    kl: float = 0.001,
    level: str = "step",
    entropies_S_T: jax.Array | None = None,
    entropy_weight: float = 0.001,
    max_log_ratio: float = 3.0,
) -> tuple[jax.Array, jax.Array]:
    """Sum the clipped loss of the steps, sections 3.2 and 3.3; divide once an optimizer step.

    With ratio r and advantage A, a step's loss is `max(-r A, -clip(r, 1 - clip, 1 + clip) A)`, for
    A < 0 no more than `-dual_clip A`, plus `kl` times the k3 estimate `exp(u) - u - 1` with
    `u = log pi_ref - log pi`, minus `entropy_weight` times the entropy. At the level of steps,
    these two are means over a step's tokens, so that every term weighs each step the same and
    sums of parts add up; at the level of tokens each token has its own ratio and weighs the same.

    Args:
      log_probs_S_T: float [S, T], log pi of the sampled tokens, nats; carries the gradient.
      old_log_probs_S_T, reference_log_probs_S_T: float [S, T], nats.
      advantages_S: float [S], one a step.
      mask_S_T: bool [S, T], true at the step's tokens; elsewhere, and in steps without tokens,
        anything may stand, NaN included.
      clip: radius of the ratio's clip.
      dual_clip: bound of the loss at negative advantages, in units of the advantage.
      kl: coefficient of the penalty.
      level: one of `LEVELS`.
      entropies_S_T: float [S, T], of the next-token distributions, nats; carries a gradient too.
        None: no bonus.
      entropy_weight: coefficient of the bonus.
      max_log_ratio: log-ratios are cut at this (nats).

    Returns:
      float32 scalars: the sum, and how many steps (tokens) it is over.

    Raises:
      ValueError: shapes differ, or an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, not {level!r}")
    log_ratios, mask = _log_ratios(log_probs_S_T, old_log_probs_S_T, mask_S_T)
    steps = jnp.any(mask, axis=1)
    advantages = jnp.asarray(advantages_S, jnp.float32)
    if advantages.shape != steps.shape:
        raise ValueError(f"advantages must be [{steps.size}], got {list(advantages.shape)}")
    advantages = jax.lax.stop_gradient(jnp.where(steps, advantages, 0.0))
    reference = jax.lax.stop_gradient(reference_log_probs_S_T)
    to_reference, _ = _log_ratios(reference, log_probs_S_T, mask)
    to_reference = jnp.clip(to_reference, -_MAX_KL_LOG_RATIO, _MAX_KL_LOG_RATIO)
    token_terms = kl * (jnp.expm1(to_reference) - to_reference)
    if entropies_S_T is not None:
        token_terms -= entropy_weight * jnp.where(mask, entropies_S_T, 0.0)
    if level == "step":
        log_ratios, token_terms = (_step_means(x, mask) for x in (log_ratios, token_terms))
        counted = steps
    else:
        advantages, counted = advantages[:, None], mask
    ratios = jnp.exp(jnp.minimum(log_ratios, max_log_ratio))
    losses = jnp.maximum(-ratios * advantages,
                         -jnp.clip(ratios, 1.0 - clip, 1.0 + clip) * advantages)
    losses = jnp.where(advantages < 0, jnp.minimum(losses, -dual_clip * advantages), losses)
    losses = jnp.where(counted, losses + token_terms, 0.0)
    return jnp.sum(losses), jnp.sum(counted.astype(jnp.float32))


def _log_ratios(log_probs, old_log_probs, mask):
    """Return the differences within the mask, 0 elsewhere, and the mask."""
    new, old = jnp.asarray(log_probs, jnp.float32), jnp.asarray(old_log_probs, jnp.float32)
    mask = jnp.asarray(mask, bool)
    if new.ndim != 2 or not new.shape == old.shape == mask.shape:
        raise ValueError(
            "log-probs and mask must be [steps, tokens] each, got "
            f"{list(new.shape)}, {list(old.shape)} and {list(mask.shape)}")
    return jnp.where(mask, new, 0.0) - jnp.where(mask, old, 0.0), mask


def _step_means(values_S_T, mask_S_T):
    return jnp.sum(values_S_T, axis=1) / jnp.maximum(jnp.sum(mask_S_T, axis=1), 1)
