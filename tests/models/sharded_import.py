"""Read models onto eight CPU devices in many layouts; run by test_sharded_import."""

import dataclasses
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memcalib_jax import models
from memcalib_jax.models.config import DeltaNet, Experts
from memcalib_jax.models.rope import Rope
from memcalib_jax.models.weights import hugging_face
from memcalib_jax.models.weights.families import PARAMETERS, flat_shapes

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("four", "two"))
SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_heads=8, num_kv_heads=4,
             head_dim=8, tie_embeddings=False)
CONFIGS = {
    "qwen2": models.ModelConfig("qwen2", num_layers=4, attention_bias=True, **SIZES),
    "qwen3_5_moe": models.ModelConfig(
        "qwen3_5_moe", num_layers=8, qk_norm=True, attention_gate=True, zero_centred_norms=True,
        experts=Experts(4, 2, shared_size=8), rope=Rope(partial_rotary_factor=0.25),
        delta=DeltaNet(("delta", "attention"), 4, 8, 4, 4, conv_size=4), **SIZES)}


def write(folder, config):
    random = np.random.RandomState(0)
    flat = {path: random.standard_normal(shape).astype(np.float32)
            for path, shape in flat_shapes(config).items()}
    models.save(folder, unflatten_dict(flat, sep="/"), config)
    return flat


def counting(checkpoint, counts):
    """Returns the checkpoint with tensors that add up how many numbers are read."""
    def count(read):
        def counted(index=...):
            values = read(index)
            counts.append(values.size)
            return values
        return counted

    return dataclasses.replace(checkpoint, tensors={
        name: dataclasses.replace(tensor, read=count(tensor.read))
        for name, tensor in checkpoint.tensors.items()})


def read(folder, specs):
    """Loads in a layout; returns the parameters and how many numbers were read."""
    counts = []
    shardings = {path: NamedSharding(MESH, spec) for path, spec in specs.items()}
    params = counting(hugging_face.open_folder(folder), counts).parameters(
        np.float32, unflatten_dict(shardings, sep="/"))
    flat = flatten_dict(params, sep="/")
    assert all(flat[path].sharding == shardings[path] for path in flat)
    return flat, sum(counts)


def axis_specs(shape):
    """Yields every way to split one or two axes, or none."""
    places = [(axis, name) for name, size in MESH.shape.items() for axis in range(len(shape))
              if shape[axis] % size == 0]
    yield PartitionSpec()
    for axis, name in places:
        yield PartitionSpec(*[name if i == axis else None for i in range(len(shape))])
    for axis, name in places:
        for other, other_name in places:
            if axis != other and (name, other_name) == ("four", "two"):
                yield PartitionSpec(*[{axis: name, other: other_name}.get(i)
                                      for i in range(len(shape))])


def main(folder):
    for family, config in CONFIGS.items():
        values = write(folder / family, config)
        total = sum(x.size for x in values.values())
        ways = {path: list(axis_specs(x.shape)) for path, x in values.items()}
        for way in range(max(map(len, ways.values()))):
            specs = {path: found[way % len(found)] for path, found in ways.items()}
            flat, _ = read(folder / family, specs)
            for path in values:
                assert np.array_equal(flat[path], values[path]), (family, path, specs[path])
        # Split along layers, experts or a first input or output axis, every number is read once,
        # however many devices hold it.
        for axis_of in (lambda stacked, inputs: 0, lambda stacked, inputs: stacked - 1,
                        lambda stacked, inputs: stacked,
                        lambda stacked, inputs: stacked + inputs):
            specs = {}
            for path, x in values.items():
                stacked, inputs = PARAMETERS[path].stacked_axes, PARAMETERS[path].input_axes
                axis = axis_of(stacked, inputs) if stacked and inputs is not None else None
                specs[path] = PartitionSpec(*["four" if i == axis and x.shape[i] % 4 == 0 else None
                                              for i in range(x.ndim)])
            _, count = read(folder / family, specs)
            assert count == total, (family, specs, count, total)
    print("every layout equals the whole")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
