"""Reading a GGUF file: settings, and tensors that are dequantized when read."""

from pathlib import Path

import gguf
import numpy as np

from memcalib_jax.models.rope import Rope
from memcalib_jax.models.weights.checkpoint import (
    Checkpoint, ModelError, StoredTensor, check_number, make_config)
from memcalib_jax.models.weights.families import FAMILIES, PARAMETERS, SETTINGS

_FAMILY_OF = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def read_file(path: Path) -> gguf.GGUFReader:
    """Returns a reader of the file's metadata and its memory-mapped tensors."""
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ModelError(f"{path}: not a whole GGUF file ({error}); it may be cut short: "
                         "download it again") from error


def setting(reader: gguf.GGUFReader, key: str, default=None):
    """Returns the value of a metadata key, or `default` where the file has none."""
    field = reader.get_field(key)
    return default if field is None else field.contents()


def open_file(path: Path) -> Checkpoint:
    """Opens a .gguf file of a known family; reads metadata only.

    The embeddings are tied where the file has no tensor for the head. `eos_ids` are the file's
    end-of-sequence and end-of-turn tokens.

    Raises:
      ModelError: the file is damaged or the model is not of a known family.
    """
    reader = read_file(path)
    family = _FAMILY_OF.get(setting(reader, "general.architecture"))
    if family is None:
        raise ModelError(f"{path}: unknown architecture {setting(reader, 'general.architecture')};"
                         f" known: {', '.join(_FAMILY_OF)}")
    if setting(reader, "split.count", 1) > 1:
        raise ModelError(f"{path}: one of several parts; merge them into one file first")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    embed, head = (PARAMETERS[name].names.gguf for name in ("embed", "head"))
    prefix = FAMILIES[family].gguf
    numbers = {field: setting(reader, f"{prefix}.{names.gguf}")
               for field, names in SETTINGS.items()}
    theta = setting(reader, f"{prefix}.rope.freq_base", 10000.0)
    check_number(path, f"{prefix}.rope.freq_base", theta, float)
    if numbers["vocab_size"] is None and embed in stored:
        numbers["vocab_size"] = int(stored[embed].shape[-1])
    config = make_config(
        path, family, numbers, rope=Rope(theta), tie_embeddings=head not in stored,
        eos_ids=[i for i in (setting(reader, key) for key in _EOS_KEYS) if i is not None])
    _refuse_unsupported(reader, config, stored, path)
    return Checkpoint(path, "gguf", config,
                      {name: _tensor(tensor, config) for name, tensor in stored.items()})


def _refuse_unsupported(reader, config, stored, path):
    prefix = FAMILIES[config.family].gguf
    scaling = setting(reader, f"{prefix}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in stored:
        raise ModelError(f"{path}: scaled rotary positions ({scaling}) are not supported")
    rotated = setting(reader, f"{prefix}.rope.dimension_count", config.head_dim)
    if rotated != config.head_dim:
        raise ModelError(f"{path}: {rotated} of {config.head_dim} dimensions of a head are "
                         "rotated; only all are supported")
    window = setting(reader, f"{prefix}.attention.sliding_window", 0)
    if window:
        raise ModelError(f"{path}: a sliding window ({window}) is not supported")
    for kind, tensor in {tensor.tensor_type: tensor for tensor in stored.values()}.items():
        try:
            gguf.dequantize(tensor.data[:1], kind)
        except NotImplementedError as error:
            raise ModelError(f"{path}: {tensor.name} is quantized as {kind.name}, which cannot be "
                             "read; use a Q4_0 ... Q8_0, F16 or F32 file") from error


def _tensor(tensor, config):
    """Returns a stored tensor as the rest of the house has it, dequantized when read."""
    heads = {PARAMETERS[f"layers/{x}"].names.gguf.removeprefix("blk.{}."): n
             for x, n in (("q", config.num_heads), ("k", config.num_kv_heads))}
    kind = tensor.name.partition(".")[2].partition(".")[2]
    interleaved = FAMILIES[config.family].interleaved_in_gguf and kind in heads

    def read(index=...):
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        return (_halves(values, heads[kind]) if interleaved else values)[index]

    # GGUF lists the fastest axis first.
    return StoredTensor(tuple(int(n) for n in tensor.shape[::-1]), np.dtype(np.float32), read)


def _halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders each head's rows from rotary pairs (2i, 2i + 1) to halves (i, i + d / 2)."""
    by_pair = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return by_pair.swapaxes(1, 2).reshape(rows.shape)
