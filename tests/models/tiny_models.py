"""Small random checkpoints of every family, made from numpy seeds alone."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from memcalib_jax.models.packed import logits
from memcalib_jax.models.weights.families import PARAMETERS, flat_shapes, tensor_names

GOLDEN = Path(__file__).parents[1] / "golden"
GGUF_CASES = ("llama_tied", "llama_untied", "llama_wide_heads", "qwen2_tied", "qwen2_untied",
              "qwen3_tied", "qwen3_untied")
CASES = (*GGUF_CASES, "llama_scaled", "llama_linear", "qwen2_yarn", "ministral3_tied",
         "ministral3_untied", "qwen3_moe_tied", "qwen3_moe_untied", "qwen3_5_tied",
         "qwen3_5_untied", "qwen3_5_moe_untied")
# Gradients take long to compile: one case of each family, heads tied and not.
WITH_GRADIENTS = ("llama_tied", "qwen2_untied", "qwen3_tied", "ministral3_tied",
                  "qwen3_moe_untied", "qwen3_5_tied")


def golden(name: str) -> dict:
    """Returns a file of golden values; text entries are parsed as JSON."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: json.loads(str(value)) if value.dtype.kind == "U" else value
                for key, value in file.items()}


def random_tensors(shapes: dict, seed: int) -> dict:
    """Returns float32 tensors of `shapes`, of a size that makes attention and logits uneven.

    `RandomState` draws the same numbers in every version of numpy.
    """
    random = np.random.RandomState(seed)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        values = random.standard_normal(tuple(shape))
        if name.endswith("norm.weight"):
            values = 1 + 0.3 * values
        elif name.endswith("dt_bias"):  # memories that last for tens of tokens
            values = values - 4
        elif len(shape) > 1 and "embed" not in name:
            values = values * (1.5 * shape[-1] ** -0.5)
        tensors[name] = values.astype(np.float32)
    return tensors


def row_lengths(case: str) -> tuple[int, ...]:
    """Returns lengths of rows that show all of a model: delta nets work in chunks of 64 tokens."""
    return (9, 80) if case.startswith("qwen3_5") else (9, 4, 7)


def random_rows(vocab_size: int, seed: int, lengths=(9, 4, 7)):
    """Returns int32 tokens `[B, S]` and lengths `[B]`, right-padded with id 0."""
    random = np.random.RandomState(seed)
    lengths = np.array(lengths, np.int32)
    tokens = random.randint(0, vocab_size, (len(lengths), lengths.max())).astype(np.int32)
    tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] = 0
    return tokens, lengths


def write_folder(folder: Path, settings: dict, tensors: dict) -> Path:
    """Writes a Hugging Face folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors")
    return folder


def stored_tensors(params, config) -> dict:
    """Returns a tree of parameters (or gradients) as the transformers library's tensors."""
    flat, stored = flatten_dict(params, sep="/"), {}
    for path in flat_shapes(config):
        values, placement = np.asarray(flat[path]), PARAMETERS[path]
        parts = values.reshape(-1, *values.shape[placement.stacked_axes:])
        names = tensor_names(path, config, "hugging_face")
        stored |= {name: placement.to_stored(part)
                   for name, part in zip(names, parts, strict=True)}
    return group_experts(stored, config) if config.experts else stored


def group_experts(tensors: dict, config) -> dict:
    """Returns tensors with each layer's experts in one tensor a matrix, gates and ups together."""
    tensors = dict(tensors)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            np.stack([tensors.pop(f"{prefix}.{expert}.{name}_proj.weight")
                      for expert in range(config.experts.count)])
            for name in ("gate", "up", "down"))
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([gates, ups], axis=1)
        tensors[f"{prefix}.down_proj"] = downs
    return tensors


@functools.partial(jax.jit, static_argnames="config")
def logits_and_gradients(params, config, tokens, lengths):
    """Returns the logits and the gradients of the summed log-prob of all but first tokens."""
    def summed_log_prob(params):
        values = logits(params, config, tokens, lengths)
        log_probs = jax.nn.log_softmax(values[:, :-1])
        chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
        valid = jnp.arange(1, tokens.shape[1]) < lengths[:, None]
        return jnp.sum(jnp.where(valid, chosen, 0.0)), values

    gradients, values = jax.grad(summed_log_prob, has_aux=True)(params)
    return values, gradients
