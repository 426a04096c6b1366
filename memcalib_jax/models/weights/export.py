"""Writing a model as a Hugging Face folder."""

import dataclasses
import functools
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.weights import config_json, hugging_face
from memcalib_jax.models.weights.checkpoint import ModelError, StoredTensor
from memcalib_jax.models.weights.families import PARAMETERS, tensor_names
from memcalib_jax.models.weights.load import load_config
from memcalib_jax.models.weights.locate import locate
from memcalib_jax.models.weights.safetensors_file import OutgoingTensor, write_file
from memcalib_jax.models.weights.tokenizer import load_tokenizer

# What lies beside the weights and is carried over as it is: tokenizer, template, processor.
_COPIED = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_WRITTEN_ANEW = ("config.json", "model.safetensors.index.json")


def save(path, params: dict, config: ModelConfig, *, dtype=None, source=None,
         max_shard_bytes: int = 5_000_000_000):
    """Writes a folder that transformers, vLLM and `load` read.

    The folder is a whole one or is not there: its files are written into a hidden folder beside
    it, which gets the name at the end. Besides `params`, the host holds a tensor or a few layers
    of one parameter.

    Args:
      path: the folder; it may exist, empty.
      params: tree of `config.parameter_shapes()`.
      config: the model's shape.
      dtype: floating-point dtype of the weights; None: of each, what it has in the folder
        `source`, else what it has in `params`.
      source: the model that `params` come from, as `load` takes it. From a Hugging Face folder
        everything is carried over but the text model's weights; from a .gguf file the tokenizer
        is. None: there will be no tokenizer.
      max_shard_bytes: most bytes of a weights file, unless one tensor alone has more.

    Raises:
      ModelError: see `check`.
    """
    path = Path(path).resolve()
    plan = _plan(path, params, config, dtype, source)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_weights(partial, plan.tensors, max_shard_bytes)
        for file in plan.copied:
            shutil.copyfile(file, partial / file.name)
        if plan.tokenizer is not None:
            plan.tokenizer.save_pretrained(partial)
        if config.eos_ids and not (partial / "generation_config.json").exists():
            _write_json(partial / "generation_config.json", {"eos_token_id": list(config.eos_ids)})
        _write_json(partial / "config.json", plan.settings)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check(path, config: ModelConfig, *, dtype=None, source=None):
    """Refuses what `save` would refuse of float32 parameters, before they are there.

    Args:
      path, config, dtype, source: as for `save`.

    Raises:
      ModelError: the folder exists and is not empty, it cannot be made, the disk has too little
        space, `source` is a model of another shape, or its tokenizer cannot be read.
    """
    params = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
                          config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple))
    _plan(Path(path).resolve(), params, config, dtype, source)


class _Plan(NamedTuple):
    settings: dict
    tensors: list[OutgoingTensor]
    copied: list[Path]
    tokenizer: Any


def _plan(path, params, config, dtype, source):
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ModelError(f"{path}: already exists and is not empty; choose another folder")
    shapes = jax.tree.map(lambda x: tuple(x.shape), params)
    if shapes != config.parameter_shapes():
        raise ValueError("params must have the tree and shapes of config.parameter_shapes()")
    dtype = None if dtype is None else jnp.dtype(dtype)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be floating-point, not {dtype.name}")
    parts, copied, tokenizer = _parts(params, config), [], None
    source = None if source is None else locate(source)
    if source is not None and not _same_shape(load_config(source), config):
        raise ModelError(f"{source}: this is a model of another shape than the parameters; give "
                         "the one that they come from")
    if source is not None and source.is_dir():
        settings = hugging_face.read_json(source / "config.json")
        tensors = _like_folder(source, settings, config, parts, dtype)
        copied = sorted(file for pattern in _COPIED for file in source.glob(pattern)
                        if file.name not in _WRITTEN_ANEW)
    else:
        settings = config_json.write_config(config)
        tensors = [_outgoing(name, part, dtype, [part]) for name, part in parts.items()]
        tokenizer = source and load_tokenizer(source)
        settings["dtype"] = tensors[0].dtype.name
    if dtype is not None:
        _state_dtype(settings, dtype)
    _check_space(path, sum(tensor.nbytes for tensor in tensors))
    tensors.sort(key=lambda tensor: _natural(tensor.name))
    return _Plan(settings, tensors, copied, tokenizer)


def _parts(params, config) -> dict[str, StoredTensor]:
    """Returns the parameters as the tensors of the families' table, by their names."""
    flat = flatten_dict(params, sep="/")

    # One copy to the host a layer, also where a layer is many tensors: those of its experts,
    # which have three matrices each.
    @functools.lru_cache(maxsize=3)
    def layer(path, number):
        return np.asarray(flat[path][number])

    def read(path, place, index=...):
        values = layer(path, place[0])[place[1:]] if place else np.asarray(flat[path])
        return PARAMETERS[path].to_stored(values)[index]

    parts = {}
    for path, value in flat.items():
        stacked = PARAMETERS[path].stacked_axes
        shape = PARAMETERS[path].stored_shape(value.shape[stacked:])
        for name, place in zip(tensor_names(path, config, "hugging_face"),
                               np.ndindex(value.shape[:stacked]), strict=True):
            parts[name] = StoredTensor(
                shape, jnp.dtype(value.dtype), functools.partial(read, path, place))
    return parts


def _like_folder(folder, settings, config, parts, dtype) -> list[OutgoingTensor]:
    """Lays the parts out under the names and in the shapes that the tensors of `folder` have."""
    stored = hugging_face.open_tensors(folder)
    # Import knows the way from stored tensors to parts. It is walked here with tensors that read
    # as the place they stand at, which tells the way back.
    traced = {name: dataclasses.replace(tensor, read=lambda index=..., name=name: (name, index))
              for name, tensor in stored.items()}
    places = defaultdict(list)
    for part, tensor in hugging_face.text_tensors(traced, settings, config, folder).items():
        name, index = tensor.read()
        places[name].append((index, part))
    tensors = []
    for name, tensor in stored.items():
        if name not in places:  # of another part of the model than the text
            tensors.append(_outgoing(name, tensor, tensor.dtype, [tensor]))
            continue
        in_order = sorted(places[name], key=lambda place: _start(place[0]))
        pieces = [parts[part] for _, part in in_order if part in parts]
        if pieces:  # none: the copy of a tied head
            tensors.append(_outgoing(name, tensor, dtype, pieces))
    return tensors


def _start(index):
    """Returns where a part begins in its tensor, to sort by."""
    return () if index is ... else (index[0], index[1].start)


def _outgoing(name, like, dtype, pieces) -> OutgoingTensor:
    return OutgoingTensor(name, dtype or like.dtype, like.shape,
                          lambda: (piece.read() for piece in pieces))


def _same_shape(config, other):
    return dataclasses.replace(config, eos_ids=()) == dataclasses.replace(other, eos_ids=())


def _state_dtype(settings, dtype):
    """Puts the dtype wherever the settings name one."""
    for place in (settings, settings.get("text_config") or {}):
        for key in ("dtype", "torch_dtype"):
            if key in place:
                place[key] = dtype.name
    settings.setdefault("dtype", dtype.name)


def _check_space(path, needed):
    place = next(place for place in path.parents if place.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ModelError(f"{path}: {place} is no folder that can be written; choose another")
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ModelError(f"{path}: the weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB "
                         "are free there")


def _natural(name):
    """Returns a key that sorts layers by their numbers."""
    return re.sub(r"\d+", lambda number: number[0].zfill(8), name)


def _write_weights(folder: Path, tensors: Sequence[OutgoingTensor], max_shard_bytes: int):
    """Writes model.safetensors, or shards and their index."""
    shards, size = [[]], 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        return write_file(folder / "model.safetensors", tensors)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / file, shard)
        weight_map |= {tensor.name: file for tensor in shard}
    _write_json(folder / "model.safetensors.index.json", {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": weight_map})


def _write_json(path: Path, content: dict):
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
