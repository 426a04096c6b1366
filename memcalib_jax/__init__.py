"""Calibrated use of agent memory in JAX: the pure functions that assign credit."""

from memcalib_jax.credit import (
    BOUND,
    CHANNELS,
    CONTROL,
    IGNORE,
    CreditConfig,
    CreditDiagnostics,
    channel_members,
    channel_rewards,
    gdpo_advantages,
    grpo_advantages,
    init_thresholds,
    localization_signs,
    memcalib_advantages,
    normalize_groups,
    project_multipliers,
    update_thresholds,
)

__all__ = [
    "BOUND",
    "CHANNELS",
    "CONTROL",
    "CreditConfig",
    "CreditDiagnostics",
    "IGNORE",
    "channel_members",
    "channel_rewards",
    "gdpo_advantages",
    "grpo_advantages",
    "init_thresholds",
    "localization_signs",
    "memcalib_advantages",
    "normalize_groups",
    "project_multipliers",
    "update_thresholds",
]
