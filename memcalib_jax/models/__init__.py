"""Decoders as pure functions of (parameters, config, tokens)."""

from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.packed import logits

__all__ = ["ModelConfig", "logits"]
