"""Weights and tokenizers on disk: Hugging Face folders and GGUF files."""

from memcalib_jax.models.weights.checkpoint import ModelError
from memcalib_jax.models.weights.export import save
from memcalib_jax.models.weights.families import parameter_axes
from memcalib_jax.models.weights.load import load, load_config
from memcalib_jax.models.weights.locate import default_model_path, locate
from memcalib_jax.models.weights.tokenizer import load_tokenizer

__all__ = ["ModelError", "default_model_path", "load", "load_config", "load_tokenizer",
           "locate", "parameter_axes", "save"]
