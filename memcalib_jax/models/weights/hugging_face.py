"""Reading a Hugging Face folder: config.json and safetensors."""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.weights.checkpoint import (
    Checkpoint, ModelError, StoredTensor, make_config)
from memcalib_jax.models.weights.families import FAMILIES, PARAMETERS, SETTINGS

_FAMILY_OF = {family.architecture: name for name, family in FAMILIES.items()}
_FLOATING = ("F64", "F32", "F16", "BF16")
# Buffers that old versions of transformers wrote beside the parameters.
_BUFFERS = (".rotary_emb.inv_freq",)


def open_folder(folder: Path) -> Checkpoint:
    """Opens a folder with config.json and model.safetensors, whole or in shards.

    Reads headers only, except for a head stored beside tied embeddings, which is compared. The
    config's `eos_ids` come from config.json and generation_config.json.

    Raises:
      ModelError: a file is missing or damaged, or the model is not of a known family.
    """
    path = folder / "config.json"
    if not path.is_file():
        hint = ("; name the .gguf file itself to load it" if any(folder.glob("*.gguf")) else
                "; a model is a folder with config.json and model.safetensors, or a .gguf file")
        raise ModelError(f"{folder}: there is no config.json{hint}")
    settings = _read_json(path)
    generation = folder / "generation_config.json"
    eos = [settings.get("eos_token_id"),
           _read_json(generation).get("eos_token_id") if generation.is_file() else None]
    config = read_config(settings, path, eos_ids=[i for ids in eos for i in _as_list(ids)])
    tensors = {name: tensor for name, tensor in _open_tensors(folder).items()
               if not name.endswith(_BUFFERS)}
    if config.tie_embeddings:
        _drop_equal_head(folder, tensors)
    return Checkpoint(folder, "hugging_face", config, tensors)


def read_config(settings: dict, path: Path, *, eos_ids=()) -> ModelConfig:
    """Returns the ModelConfig that the `settings` of a config.json describe.

    Raises:
      ModelError: the settings ask for something the forward does not do, or lack a number.
    """
    architectures = _as_list(settings.get("architectures"))
    if len(architectures) != 1 or architectures[0] not in _FAMILY_OF:
        found = ", ".join(map(str, architectures)) or "(none named)"
        raise ModelError(f"{path}: unknown architecture {found}; known: {', '.join(_FAMILY_OF)}")
    family = _FAMILY_OF[architectures[0]]
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{path}: rope_parameters must be an object, not {rope!r}")
    numbers = {field: settings.get(names.hugging_face) for field, names in SETTINGS.items()}
    numbers["rope_theta"] = rope.get("rope_theta", numbers["rope_theta"])
    numbers["norm_eps"] = 1e-6 if numbers["norm_eps"] is None else numbers["norm_eps"]
    config = make_config(path, family, numbers, eos_ids=eos_ids,
                         tie_embeddings=bool(settings.get("tie_word_embeddings", False)))
    _refuse_unsupported(settings, rope, config, path)
    return config


def _refuse_unsupported(settings, rope, config, path):
    def refuse(key, value, allowed):
        raise ModelError(f"{path}: {key} is {value!r}, which is not supported; {allowed}")

    if settings.get("quantization_config"):
        refuse("quantization_config", settings["quantization_config"],
               "use the unquantized weights")
    if settings.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", settings["hidden_act"], "only silu is")
    if any(isinstance(value, dict) for value in rope.values()):
        refuse("rope_parameters", sorted(rope), "only one rotary setting for all layers is")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        refuse("rope_type", rope_type, "only default is")
    partial = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        refuse("partial_rotary_factor", partial, "only 1.0 is")
    for key in ("attention_bias", "mlp_bias"):
        # Qwen2 always has its q, k and v biases and does not read the key.
        if settings.get(key) and not config.attention_bias:
            refuse(key, settings[key], "only false is for this family")
    if config.family != "llama" and _slides(settings, config):
        refuse("layer_types or sliding_window",
               settings.get("layer_types") or settings.get("sliding_window"),
               "only full attention is")


def _slides(settings, config):
    """Says whether any layer's attention is not full (a llama's always is)."""
    if settings.get("layer_types"):
        return set(settings["layer_types"]) != {"full_attention"}
    return bool(settings.get("use_sliding_window") and settings.get("sliding_window")
                and settings.get("max_window_layers", 28) < config.num_layers)


def _open_tensors(folder):
    """Returns every tensor of the folder's safetensors files, unread, by name."""
    shards = _shards(folder)
    absent = sorted(file for file in shards if not (folder / file).is_file())
    if absent:
        raise ModelError(f"{folder}: missing {', '.join(absent)}; download the model again")
    tensors, found_in = {}, {}
    for file, listed in shards.items():
        for name, tensor in _open_file(folder / file).items():
            if name in tensors:
                raise ModelError(
                    f"{folder}: {name} is stored twice, in {found_in[name]} and {file}")
            tensors[name], found_in[name] = tensor, file
        astray = sorted(name for name in listed if found_in.get(name) != file)
        if astray:
            raise ModelError(f"{folder / file}: the index promises {', '.join(astray[:8])}, "
                             "which the file does not hold; download the model again")
    return tensors


def _shards(folder):
    """Returns, for each weights file of the folder, the tensors that an index promises in it."""
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors": ()}
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        others = sorted(file.name for file in folder.glob("*.bin"))
        hint = f" (there is {others[0]}: convert it to safetensors)" if others else ""
        raise ModelError(f"{folder}: there is neither model.safetensors nor {index.name}{hint}")
    shards = {}
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: there is no weight_map")
    for name, file in weight_map.items():
        shards.setdefault(file, []).append(name)
    return shards


def _open_file(path):
    try:
        file = safe_open(path, framework="numpy")
        slices = {name: file.get_slice(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a whole safetensors file ({error}); it may be cut short "
                         "or a pointer instead of the file: download it again") from error
    for name, part in slices.items():
        if part.get_dtype() not in _FLOATING:
            raise ModelError(f"{path}: {name} has dtype {part.get_dtype()}; only floating-point "
                             f"weights ({', '.join(_FLOATING)}) are supported")
    return {name: StoredTensor(tuple(part.get_shape()), lambda name=name: file.get_tensor(name))
            for name, part in slices.items()}


def _drop_equal_head(folder, tensors):
    """Drops a head stored beside tied embeddings; refuses one that is not their copy."""
    embed, head = (PARAMETERS[path].names.hugging_face for path in ("embed", "head"))
    if head not in tensors or embed not in tensors:
        return
    if not np.array_equal(tensors[head].read(), tensors[embed].read()):
        raise ModelError(f"{folder}: tie_word_embeddings is true, yet {head} differs from {embed}; "
                         "set it to false in config.json if the head is meant to be its own")
    del tensors[head]


def _read_json(path):
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _as_list(value):
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
