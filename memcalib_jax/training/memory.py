"""What a training step keeps on each device, told from shapes alone."""

import math

import jax
import numpy as np

from memcalib_jax.models import ModelConfig
from memcalib_jax.models.lora import LoraConfig, adapter_shapes
from memcalib_jax.parallel import without
from memcalib_jax.training.rollouts import SamplingConfig


def step_memory(config: ModelConfig, layout: dict, compute_dtype: str, *,
                lora: LoraConfig | None = None, lora_layout: dict | None = None,
                sampling: SamplingConfig, num_prompts: int, prompt_tokens: int,
                bin_tokens: int, num_devices: int = 1) -> dict[str, int]:
    """Returns the bytes that a step keeps on a device, by what they are.

    What a program needs besides while it runs, beyond the residual stream that the gradient keeps
    of each layer, is not counted: `benchmarks/tpu_aot.py` asks the compiler for that.

    Args:
      config: the model's shape.
      layout: tree of shardings of its parameters.
      compute_dtype: of the products.
      lora, lora_layout: the adapter that is trained instead, and its shardings.
      sampling: how many responses a prompt has, and how long they may be.
      num_prompts: that decode at once.
      prompt_tokens: of the longest prompt.
      bin_tokens: of a packed bin.
      num_devices: of the mesh.
    """
    width = np.dtype(jax.dtypes.canonicalize_dtype(compute_dtype)).itemsize
    whole = _elements(config.parameter_shapes(), layout)
    trained = _elements(adapter_shapes(config, lora), lora_layout) if lora else whole
    decoding = 0
    if num_devices > 1:  # gathered over fsdp, as `rollouts` does it
        decoding = width * _elements(config.parameter_shapes(), jax.tree.map(
            lambda sharding: without(sharding, "fsdp"), layout))
    kept = {"master weights": 4 * trained, "optimizer moments": 8 * trained,
            "gradients": 4 * trained, "reference" if not lora else "frozen base": width * whole,
            "weights of products": 0 if lora else width * whole,
            "weights of decoding": decoding,
            "decoding cache": _cache(config, sampling, num_prompts, prompt_tokens, width)
            // num_devices,
            "residual stream": 4 * config.num_layers * config.hidden_size * bin_tokens}
    return {name: size for name, size in kept.items() if size}


def _elements(shapes, layout) -> int:
    shards = jax.tree.map(lambda shape, sharding: math.prod(sharding.shard_shape(shape)),
                          shapes, layout, is_leaf=lambda x: isinstance(x, tuple))
    return sum(jax.tree.leaves(shards))


def _cache(config, sampling, num_prompts, prompt_tokens, width) -> int:
    heads = config.num_kv_heads * sum(kind == "attention" for kind in config.layer_kinds)
    tokens = prompt_tokens + sampling.num_samples * sampling.max_tokens
    return 2 * width * heads * config.head_dim * num_prompts * tokens


def device_memory() -> int | None:
    """Returns the bytes that a device of this process has; None where it does not say."""
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def memory_table(kept: dict[str, int], available: int | None) -> str:
    """Returns what `step_memory` found as lines to read."""
    lines = [f"  {name:<22}{size / 2**30:>9.2f} GiB" for name, size in kept.items()]
    total = sum(kept.values())
    has = "" if available is None else f" of {available / 2**30:.1f} GiB"
    return "\n".join(["a device keeps", *lines, f"  {'in all':<22}{total / 2**30:>9.2f} GiB{has}"])
