"""An opened checkpoint: a config, tensors not yet read, and how they fill the parameters."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.weights.families import (
    FAMILIES, PARAMETERS, SETTINGS, flat_shapes, tensor_names)


class ModelError(ValueError):
    """A model that cannot be used; the message says what is wrong, where, and what to do."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor whose shape is known and whose values are read when asked for.

    Attributes:
      shape: as stored.
      read: returns the values; given an index, only those.
    """

    shape: tuple[int, ...]
    read: Callable[..., np.ndarray]

    def rows(self, outer: int, rows: slice) -> "StoredTensor":
        """Returns the part `[outer, rows]`, unread too."""
        size = len(range(*rows.indices(self.shape[1])))
        return StoredTensor((size, *self.shape[2:]), lambda: self.read((outer, rows)))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk whose headers have been read.

    Attributes:
      path: the folder or file, for messages.
      file_format: "hugging_face" or "gguf", a field of `families.Names`.
      config: the model's shape.
      tensors: every tensor of the checkpoint that is a parameter, by its stored name.
    """

    path: Path
    file_format: str
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]

    def check(self) -> None:
        """Raises ModelError unless every tensor has its one place and every place its tensor."""
        expected = {}
        for path, shape in flat_shapes(self.config).items():
            placement = PARAMETERS[path]
            stored = placement.stored_shape(shape[placement.stacked_axes:])
            expected |= dict.fromkeys(tensor_names(path, self.config, self.file_format), stored)
        missing = [name for name in expected if name not in self.tensors]
        left_over = [name for name in self.tensors if name not in expected]
        misshapen = [
            f"{name} is {list(self.tensors[name].shape)}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in self.tensors and self.tensors[name].shape != shape]
        problems = [f"{what}: {_some(which)}" for what, which in
                    (("missing", missing), ("left over", left_over), ("wrong shape", misshapen))
                    if which]
        if problems:
            raise ModelError(
                f"{self.path}: the tensors do not fit a {self.config.family} model of "
                f"{self.config.num_layers} layers; " + "; ".join(problems))

    def parameters(self, dtype, shardings=None) -> dict:
        """Reads the tensors into the tree of `config.parameter_shapes()`.

        Reads one parameter at a time, so that the host holds the largest one, no more.

        Args:
          dtype: of every parameter.
          shardings: tree of `jax.sharding.Sharding` like the parameters, or None for the
            default device.
        """
        shapes = flat_shapes(self.config)
        if shardings is not None:
            shardings = flatten_dict(shardings, sep="/")
            if shardings.keys() != shapes.keys():
                different = ", ".join(sorted(shardings.keys() ^ shapes.keys()))
                raise ValueError(f"shardings must have the tree of the parameters; "
                                 f"they differ in: {different}")
        params = {}
        for path, shape in shapes.items():
            values = self._read(path, shape, jnp.dtype(dtype))
            params[path] = (
                jnp.asarray(values) if shardings is None else
                jax.make_array_from_callback(shape, shardings[path], values.__getitem__))
        return unflatten_dict(params, sep="/")

    def _read(self, path, shape, dtype):
        placement = PARAMETERS[path]
        values = np.empty(shape, dtype)
        places = values.reshape(-1, *shape[placement.stacked_axes:])
        names = tensor_names(path, self.config, self.file_format)
        for place, name in zip(places, names, strict=True):
            place[...] = placement.to_parameter(self.tensors[name].read(), place.shape)
        return values


def make_config(path: Path, family: str, settings: dict, *, eos_ids, **shape) -> ModelConfig:
    """Returns the config of a known family.

    Args:
      path: where the settings come from, for messages.
      family: a key of `FAMILIES`.
      settings: a number for each key of `SETTINGS`; None where the checkpoint has none, which
        `num_kv_heads` and `head_dim` allow.
      eos_ids: ids that end a response, in any order, repeated or not.
      shape: further fields of ModelConfig.
    """
    traits = FAMILIES[family]
    numbers = {name: value for name, value in settings.items() if value is not None}
    for name in SETTINGS.keys() - numbers.keys() - {"num_kv_heads", "head_dim"}:
        raise ModelError(f"{path}: the model's settings lack {_called(name)}")
    for name, value in numbers.items():
        check_number(path, _called(name), value, float if name == "norm_eps" else int)
    numbers.setdefault("num_kv_heads", numbers["num_heads"])
    numbers.setdefault("head_dim",
                       traits.head_dim or numbers["hidden_size"] // numbers["num_heads"])
    try:
        return ModelConfig(
            family=family, attention_bias=traits.attention_bias, qk_norm=traits.qk_norm,
            eos_ids=tuple(sorted(set(eos_ids))), **numbers, **shape)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def check_number(path: Path, name: str, value, kind: type) -> None:
    """Raises ModelError unless `value` is a positive number, whole where `kind` is int."""
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or value <= 0:
        raise ModelError(f"{path}: {name} must be a positive {kind.__name__}, not {value!r}")


def _called(setting):
    names = SETTINGS[setting]
    return f"{names.hugging_face} ({setting}; {names.gguf} in GGUF)"


def _some(items, limit=8):
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest
