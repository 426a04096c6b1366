"""Credit assignment as pure functions of arrays; imports jax and flax.struct only."""

from memcalib_jax.credit.assign import (
    CreditConfig,
    CreditDiagnostics,
    memcalib_advantages,
    open_directions,
)
from memcalib_jax.credit.channels import (
    BOUND,
    CHANNELS,
    CONTROL,
    IGNORE,
    channel_members,
    channel_rewards,
)
from memcalib_jax.credit.localization import localization_signs
from memcalib_jax.credit.logo import logo_advantages, logo_loss, step_ratios
from memcalib_jax.credit.normalization import (
    gdpo_advantages,
    grpo_advantages,
    normalize_groups,
)
from memcalib_jax.credit.projection import project_multipliers
from memcalib_jax.credit.thresholds import init_thresholds, update_thresholds

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
    "logo_advantages",
    "logo_loss",
    "memcalib_advantages",
    "normalize_groups",
    "open_directions",
    "project_multipliers",
    "step_ratios",
    "update_thresholds",
]
