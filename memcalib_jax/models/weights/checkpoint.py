"""An opened checkpoint: a config, tensors not yet read, and how they fill the parameters."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.weights.families import (
    FAMILIES, PARAMETERS, SETTINGS, flat_shapes, tensor_names)


# Most layers, and experts of one: what a wrong number asks for must not fill the memory before
# it is compared with the tensors.
MOST_STACKED = 10_000


class ModelError(ValueError):
    """A model that cannot be used; the message says what is wrong, where, and what to do."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor whose shape is known and whose values are read when asked for.

    Attributes:
      shape: as stored.
      dtype: as stored, or as dequantized.
      read: returns the values; given an index of slices, only those.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[..., np.ndarray]

    def rows(self, outer: int, rows: slice) -> "StoredTensor":
        """Returns the part `[outer, rows]`, unread too."""
        chosen = range(*rows.indices(self.shape[1]))

        def read(index=(slice(None),)):
            some = chosen[index[0]]
            return self.read((outer, slice(some.start, some.stop), *index[1:]))

        return StoredTensor((len(chosen), *self.shape[2:]), self.dtype, read)


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
        check_tensors(self.path, self.tensors, expected, f"a {self.config.family} model of "
                      f"{self.config.num_layers} layers")

    def parameters(self, dtype, shardings=None) -> dict:
        """Reads the tensors into the tree of `config.parameter_shapes()`.

        Reads what the devices of this host hold, one device's part of one parameter at a time,
        so that the host holds one such part besides the result. On a CPU the part is the result.

        Args:
          dtype: of every parameter.
          shardings: tree of `jax.sharding.Sharding` like the parameters, or None for the
            default device.
        """
        shapes = flat_shapes(self.config)
        if shardings is None:
            default = next(iter(jnp.zeros(()).devices()))
            shardings = dict.fromkeys(shapes, jax.sharding.SingleDeviceSharding(default))
        else:
            shardings = flatten_dict(shardings, sep="/")
        if shardings.keys() != shapes.keys():
            different = ", ".join(sorted(shardings.keys() ^ shapes.keys()))
            raise ValueError(f"shardings must have the tree of the parameters; "
                             f"they differ in: {different}")
        return unflatten_dict(
            {path: self._array(path, shape, jnp.dtype(dtype), shardings[path])
             for path, shape in shapes.items()}, sep="/")

    def _array(self, path, shape, dtype, sharding):
        holders = defaultdict(list)
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
            holders[bounds].append(device)
        parts = []
        for bounds, devices in holders.items():
            values = self._read(path, shape, tuple(slice(*pair) for pair in bounds), dtype)
            parts += jax.block_until_ready([jax.device_put(values, device) for device in devices])
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    def _read(self, path, shape, index, dtype):
        """Reads `parameter[index]`; the slices have bounds."""
        placement = PARAMETERS[path]
        stacked = placement.stacked_axes
        names = np.array(tensor_names(path, self.config, self.file_format), object)
        names = names.reshape(shape[:stacked])[index[:stacked]]
        stored, sizes, wanted = placement.covering(shape[stacked:], index[stacked:])
        values = _aligned(tuple(part.stop - part.start for part in index), dtype)
        places = values.reshape(-1, *values.shape[stacked:])
        for place, name in zip(places, np.ravel(names), strict=True):
            place[...] = placement.to_parameter(self.tensors[name].read(stored), sizes)[wanted]
        return values


def _aligned(shape, dtype) -> np.ndarray:
    """Returns an empty array that a CPU device takes over as it is, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start:start + size].view(dtype).reshape(shape)


def check_tensors(path: Path, tensors: Mapping[str, StoredTensor],
                  expected: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Raises ModelError unless `tensors` are just those `expected`, in name and shape.

    The message says where (`path`) and what (`what`) they do not fit, and names the misfits.
    """
    missing = [name for name in expected if name not in tensors]
    left_over = [name for name in tensors if name not in expected]
    misshapen = [
        f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items() if name in tensors and tensors[name].shape != shape]
    problems = [f"{kind}: {_some(which)}" for kind, which in
                (("missing", missing), ("left over", left_over), ("wrong shape", misshapen))
                if which]
    if problems:
        raise ModelError(f"{path}: the tensors do not fit {what}; " + "; ".join(problems))


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
        check_number(path, _called(name), value, float if name == "norm_eps" else int,
                     most=MOST_STACKED if name == "num_layers" else math.inf)
    wrong = [i for i in eos_ids if isinstance(i, bool) or not isinstance(i, int)]
    if wrong:
        raise ModelError(f"{path}: eos_token_id, here or in generation_config.json, must be one "
                         f"or several token ids, not {wrong[0]!r}")
    numbers.setdefault("num_kv_heads", numbers["num_heads"])
    numbers.setdefault("head_dim",
                       traits.head_dim or numbers["hidden_size"] // numbers["num_heads"])
    try:
        return ModelConfig(
            family=family, attention_bias=traits.attention_bias, qk_norm=traits.qk_norm,
            attention_gate=traits.hybrid, zero_centred_norms=traits.hybrid,
            eos_ids=tuple(sorted(set(eos_ids))), **numbers, **shape)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def check_number(path: Path, name: str, value, kind: type, *, most: float = math.inf) -> None:
    """Raises ModelError unless `value` is finite, positive, and whole where `kind` is int."""
    if (isinstance(value, bool) or not isinstance(value, (int, kind))
            or not 0 < value <= most or value == math.inf):
        limit = "" if most == math.inf else f" of at most {most}"
        raise ModelError(f"{path}: {name} must be a positive {kind.__name__}{limit}, "
                         f"not {value!r}")


def _called(setting):
    names = SETTINGS[setting]
    return f"{names.hugging_face} ({setting}; {names.gguf} in GGUF)"


def _some(items, limit=8):
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest
