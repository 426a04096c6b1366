"""Reading a Hugging Face folder: config.json and safetensors."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.weights.checkpoint import Checkpoint, ModelError, StoredTensor
from memcalib_jax.models.weights.config_json import (
    as_list, check_places, read_config, stated_ties)
from memcalib_jax.models.weights.families import FAMILIES, PARAMETERS
from memcalib_jax.models.weights.stored_forms import plain_names, split_experts

_FLOATING = {"F64": jnp.float64, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
# Buffers that old versions of transformers wrote beside the parameters.
_BUFFERS = (".rotary_emb.inv_freq",)


def open_folder(folder: Path) -> Checkpoint:
    """Opens a folder with config.json and model.safetensors, whole or in shards.

    Reads headers only, except for a head stored beside tied embeddings, which is compared. The
    config's `eos_ids` come from config.json and generation_config.json. Where config.json says of
    the embeddings that they are tied and that they are not, the head decides: there is one that
    is no copy, or not.

    Raises:
      ModelError: a file is missing or damaged, or the model is not of a known family.
    """
    path = folder / "config.json"
    if not path.is_file():
        hint = ("; name the .gguf file itself to load it" if any(folder.glob("*.gguf")) else
                "; a model is a folder with config.json and model.safetensors, or a .gguf file")
        raise ModelError(f"{folder}: there is no config.json{hint}")
    settings = read_json(path)
    check_places(settings, path)
    generation = folder / "generation_config.json"
    eos = [settings.get("eos_token_id"), (settings.get("text_config") or {}).get("eos_token_id"),
           read_json(generation).get("eos_token_id") if generation.is_file() else None]
    ties = stated_ties(settings)
    config = read_config(settings, path, eos_ids=[i for ids in eos for i in as_list(ids)],
                         tie_embeddings=True in ties)
    tensors = text_tensors(open_tensors(folder), settings, config, folder)
    if len(ties) > 1:
        config = dataclasses.replace(config, tie_embeddings=not _has_own_head(tensors))
    if config.tie_embeddings:
        _drop_equal_head(folder, tensors)
    return Checkpoint(folder, "hugging_face", config, tensors)


def text_tensors(tensors: Mapping[str, StoredTensor], settings: dict, config: ModelConfig,
                 folder: Path) -> dict[str, StoredTensor]:
    """Returns the parameters among a folder's tensors, as the families' table has them.

    Args:
      tensors: all tensors of the folder, see `open_tensors`.
      settings: those of its config.json.
      config: what they describe.
      folder: for messages.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_BUFFERS)}
    if FAMILIES[config.family].wrapper:
        tensors = plain_names(tensors, FAMILIES[config.family].not_text, folder)
    return split_experts(tensors, config, folder)


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of the folder's safetensors files, unread, by name.

    Raises:
      ModelError: a file is missing or damaged.
    """
    shards = _shards(folder)
    absent = sorted(file for file in shards if not (folder / file).is_file())
    if absent:
        raise ModelError(f"{folder}: missing {', '.join(absent)}; download the model again")
    tensors, found_in = {}, {}
    for file, listed in shards.items():
        for name, tensor in open_file(folder / file).items():
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
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: there is no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise ModelError(f"{index}: weight_map must name the file of {name}, not {file!r}")
        shards.setdefault(file, []).append(name)
    return shards


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of a safetensors file, unread, by name.

    Raises:
      ModelError: the file is damaged or holds something else than floating-point numbers.
    """
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
    return {name: StoredTensor(tuple(part.get_shape()), jnp.dtype(_FLOATING[part.get_dtype()]),
                               lambda index=..., part=part: part[index])
            for name, part in slices.items()}


def _has_own_head(tensors):
    """Says whether there is a head that is not a copy of the embedding."""
    embed, head = (PARAMETERS[path].names.hugging_face for path in ("embed", "head"))
    if head not in tensors or embed not in tensors:
        return head in tensors
    return not np.array_equal(tensors[head].read(), tensors[embed].read())


def _drop_equal_head(folder, tensors):
    """Drops a head stored beside tied embeddings; refuses one that is not their copy."""
    embed, head = (PARAMETERS[path].names.hugging_face for path in ("embed", "head"))
    if embed in tensors and _has_own_head(tensors):
        raise ModelError(f"{folder}: tie_word_embeddings is true, yet {head} differs from {embed}; "
                         "set it to false in config.json if the head is meant to be its own")
    tensors.pop(head, None)


def read_json(path: Path) -> dict:
    """Returns the object that a JSON file holds.

    Raises:
      ModelError: it cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
