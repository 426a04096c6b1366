"""Other ways to store the same tensors, brought to the names and shapes of the families' table."""

import re
from collections.abc import Mapping
from pathlib import Path

from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.weights.checkpoint import ModelError, StoredTensor

# How models of images and text call the text model's tensors, old and new.
_TEXT_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.",
                  "language_model.lm_head.": "lm_head."}
_GROUPED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")
_SINGLE = re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.")


def plain_names(tensors: Mapping[str, StoredTensor], not_text: tuple[str, ...],
                folder: Path) -> dict[str, StoredTensor]:
    """Returns the text model's tensors, as if it stood alone.

    Args:
      tensors: all tensors by their stored names.
      not_text: beginnings of the names of tensors to leave out.
      folder: for messages.
    """
    plain = {}
    for name, tensor in tensors.items():
        if name.startswith(not_text):
            continue
        for prefix, replacement in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                name = replacement + name.removeprefix(prefix)
                break
        if name in plain:
            raise ModelError(f"{folder}: {name} of the text model is stored under two names")
        plain[name] = tensor
    return plain


def split_experts(tensors: Mapping[str, StoredTensor], config: ModelConfig,
                  folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors with a layer's grouped experts as one tensor an expert and matrix.

    Grouped are `gate_up_proj [E, 2 F, D]`, the gates before the ups, and `down_proj [E, D, F]`.

    Raises:
      ModelError: some experts are grouped and others are not, or a group has another shape.
    """
    grouped = {name: match for name in tensors if (match := _GROUPED.fullmatch(name))}
    if not grouped or not config.experts:
        return dict(tensors)
    single = next((name for name in tensors if _SINGLE.match(name)), None)
    if single:
        raise ModelError(f"{folder}: experts are stored both in groups ({next(iter(grouped))}) and "
                         f"one by one ({single}); convert the model to one of the two")
    split = {name: tensor for name, tensor in tensors.items() if name not in grouped}
    count, d, f = config.experts.count, config.hidden_size, config.intermediate_size
    for name, match in grouped.items():
        expected = (count, 2 * f, d) if match[2] == "gate_up_proj" else (count, d, f)
        if tensors[name].shape != expected:
            raise ModelError(f"{folder}: {name} is {list(tensors[name].shape)}, expected "
                             f"{list(expected)} for {count} experts")
        parts = ({"gate_proj": slice(0, f), "up_proj": slice(f, 2 * f)}
                 if match[2] == "gate_up_proj" else {"down_proj": slice(0, d)})
        for expert in range(count):
            for part, rows in parts.items():
                split[f"{match[1]}.{expert}.{part}.weight"] = tensors[name].rows(expert, rows)
    return split
