"""Loading a model from disk, whatever its file format."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.weights import gguf, hugging_face
from memcalib_jax.models.weights.checkpoint import Checkpoint, ModelError
from memcalib_jax.models.weights.locate import locate
from memcalib_jax.models.weights.tokenizer import TOKENIZER_FILES, load_tokenizer


def load(path, *, dtype=jnp.float32, shardings=None) -> tuple[dict, ModelConfig]:
    """Loads a model's parameters and config.

    Headers are checked before a parameter is read: every stored tensor is used exactly once and
    every parameter is filled exactly once.

    Args:
      path: a Hugging Face folder (config.json with safetensors, whole or in shards), its name on
        the hub (see `locate`), or a .gguf file, which is dequantized.
      dtype: floating-point dtype of the parameters, and so of the matrix products' inputs.
      shardings: tree of `jax.sharding.Sharding` like `config.parameter_shapes()`, such as
        `parallel.shardings` makes of `parameter_axes(load_config(path))`; None places everything
        on the default device.

    Returns:
      `(params, config)`: the tree of `config.parameter_shapes()` and the model's shape, whose
      `eos_ids` unite what the config, the generation config and the tokenizer end a response
      with.

    Raises:
      ModelError: the model is missing, damaged or not of a supported kind.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be floating-point, not {jnp.dtype(dtype).name}")
    checkpoint = _open(locate(path))
    return checkpoint.parameters(dtype, shardings), checkpoint.config


def load_config(path) -> ModelConfig:
    """Returns the config of the model at `path`, after the checks of `load` on its headers."""
    return _open(locate(path)).config


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        checkpoint = hugging_face.open_folder(path)
        if any((path / name).is_file() for name in TOKENIZER_FILES):
            checkpoint = _with_eos(checkpoint, load_tokenizer(path).eos_token_id)
    elif path.suffix == ".gguf":
        checkpoint = gguf.open_file(path)
    else:
        raise ModelError(f"{path}: not a model; give a Hugging Face folder or a .gguf file")
    checkpoint.check()
    return checkpoint


def _with_eos(checkpoint, eos_id):
    known = set(checkpoint.config.eos_ids) | ({eos_id} if eos_id is not None else set())
    config = dataclasses.replace(checkpoint.config, eos_ids=tuple(sorted(known)))
    return dataclasses.replace(checkpoint, config=config)
