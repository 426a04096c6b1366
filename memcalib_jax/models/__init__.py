"""Decoders as pure functions of (parameters, config, tokens)."""

from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.packed import logits
from memcalib_jax.models.weights import (
    ModelError, default_model_path, load, load_config, load_tokenizer, locate, parameter_axes,
    save)

__all__ = ["ModelConfig", "ModelError", "default_model_path", "load", "load_config",
           "load_tokenizer", "locate", "logits", "parameter_axes", "save"]
