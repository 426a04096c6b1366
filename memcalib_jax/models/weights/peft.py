"""Adapters on disk in the PEFT library's format: adapter_config.json and safetensors."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import numpy as safetensors

from memcalib_jax.files import write_atomically
from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.lora import (
    ALL_LINEAR, LoraConfig, adapter_shapes, target_paths)
from memcalib_jax.models.weights.checkpoint import ModelError, check_tensors
from memcalib_jax.models.weights.families import (
    PARAMETERS, Names, Placement, layer_numbers)
from memcalib_jax.models.weights.hugging_face import open_file, read_json
from memcalib_jax.models.weights.stored_forms import plain_names

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."  # before a tensor's name in the base

# Settings that change nothing of what a stored adapter computes. Any other one that is set asks
# for something that the forward does not do.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights",
    "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type"}
# Ways to begin that take the first product out of the base weights, so that the adapter fits
# weights that are not those of its base model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def save_adapter(path, adapter: dict, lora: LoraConfig, config: ModelConfig, base_model: str):
    """Writes a folder that the PEFT library and its kin load beside the base model.

    Each file is there whole or not at all; the config comes last.

    Args:
      path: the folder, made where it is missing.
      adapter: tree of `adapter_shapes(config, lora)`, stored as float32.
      lora: rank, alpha and targets.
      config: the base model's shape.
      base_model: what the adapter is for: a folder or a name on the hub.
    """
    tensors, values = {}, flatten_dict(adapter, sep="/")
    for name, place in _places(config, lora).items():
        layer = np.asarray(values[place.path][place.row], np.float32)
        tensors[name] = np.ascontiguousarray(place.placement.to_stored(layer))
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model,
        "r": lora.rank, "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else
        lora.alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True, "target_modules": sorted(
            {_module(path) for path in target_paths(config, lora.targets)})}
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / WEIGHTS_FILE, safetensors.save(tensors, metadata={"format": "pt"}))
    write_atomically(folder / CONFIG_FILE, (json.dumps(settings, indent=2) + "\n").encode())


def load_adapter(path, config: ModelConfig) -> tuple[dict, LoraConfig]:
    """Reads an adapter of the model with `config` from a PEFT folder.

    Returns:
      The float32 tree of `adapter_shapes(config, lora)` and `lora`, whose targets are the
      projections that the file holds tensors for, by their names on the hub.

    Raises:
      ModelError: a file is missing or damaged, a setting asks for more than a plain adapter, or
        a tensor has no place, no partner or another shape; says which.
    """
    folder = Path(path)
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise ModelError(f"{folder}: an adapter is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    rank, alpha = _read_settings(folder / CONFIG_FILE)
    tensors = _plain_names(open_file(folder / WEIGHTS_FILE), folder)
    found = {_module(place.target).split(".")[-1]
             for name, place in _places(config, LoraConfig(rank, alpha)).items()
             if name in tensors}
    lora = LoraConfig(rank, alpha, tuple(sorted(found)) or (ALL_LINEAR,))
    places = _places(config, lora)
    check_tensors(folder / WEIGHTS_FILE, tensors,
                  {name: place.stored_shape for name, place in places.items()},
                  f"an adapter of a {config.family} model of {config.num_layers} layers")
    adapter = {name: np.empty(shape, np.float32) for name, shape in
               flatten_dict(adapter_shapes(config, lora), sep="/").items()}
    for name, place in places.items():
        into = adapter[place.path][place.row]
        into[...] = place.placement.to_parameter(tensors[name].read(), into.shape)
    return unflatten_dict(adapter, sep="/"), lora


def _plain_names(tensors, folder):
    """Returns tensors under the names that they have where the text model stands alone."""
    of_base = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()
               if name.startswith(_PREFIX)}
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(_PREFIX)}
    return others | {_PREFIX + name: tensor
                     for name, tensor in plain_names(of_base, (), folder).items()}


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a stored tensor goes: a row of `path`, the adapter of the projection `target`."""

    target: str
    path: str
    row: int
    placement: Placement
    stored_shape: tuple[int, ...]


def _places(config, lora) -> dict[str, _Place]:
    """Returns the place of every tensor of an adapter, by its stored name."""
    shapes, places = flatten_dict(adapter_shapes(config, lora), sep="/"), {}
    for target in target_paths(config, lora.targets):
        base, layers = PARAMETERS[target], layer_numbers(target, config)
        for letter, input_axes in (("a", base.input_axes), ("b", 1)):
            path = f"{target}_lora_{letter}"
            placement = Placement(
                Names(_stored_name(base.names.hugging_face, letter), ""), input_axes)
            stored_shape = placement.stored_shape(shapes[path][1:])
            names = placement.tensor_names("hugging_face", layers)
            places |= {name: _Place(target, path, row, placement, stored_shape)
                       for row, name in enumerate(names)}
    return places


def _stored_name(name, letter):
    return f"{_PREFIX}{name.removesuffix('.weight')}.lora_{letter.upper()}.weight"


def _module(path):
    """Returns the module of a projection within its layer, as on the hub: "self_attn.q_proj"."""
    return PARAMETERS[path].names.hugging_face.split("{}.")[1].removesuffix(".weight")


def _read_settings(path):
    settings = read_json(path)

    def refuse(key, why):
        raise ModelError(f"{path}: {key} is {settings.get(key)!r}; {why}")

    if settings.get("peft_type") != "LORA":
        refuse("peft_type", "only LORA is supported")
    for key in ("r", "lora_alpha"):
        value = settings.get(key)
        if (isinstance(value, bool) or not isinstance(value, (int, float))
                or not 0 < value < math.inf):
            refuse(key, "it must be a positive number")
    if not isinstance(settings["r"], int):
        refuse("r", "it must be a whole number")
    begin = settings.get("init_lora_weights")
    if isinstance(begin, str) and begin.lower().startswith(_CHANGES_BASE):
        refuse("init_lora_weights", "such an adapter fits changed base weights; convert it to a "
               "plain one with PEFT's path_initial_model_for_weight_conversion")
    for key, value in settings.items():
        if key not in _WITHOUT_EFFECT and value and (key, value) != ("bias", "none"):
            refuse(key, "only plain adapters of projections are supported")
    return settings["r"], settings["lora_alpha"]
