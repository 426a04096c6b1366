"""Rules from logical axes to mesh axes, by hand and for every family."""

import dataclasses

import jax
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from memcalib_jax.models.config import FAMILIES, DeltaNet, Experts, ModelConfig
from memcalib_jax.models.weights.families import FAMILIES as TRAITS
from memcalib_jax.models.weights.families import parameter_axes
from memcalib_jax.parallel import AXES, partition_spec, shardings


def mesh_of(**sizes):
    return AbstractMesh(tuple(sizes.get(name, 1) for name in AXES), AXES,
                        axis_types=(AxisType.Auto,) * len(AXES))


@pytest.mark.parametrize("axes, shape, sizes, expected", [
    # Split as the rules say.
    (("embed", "heads", "head"), (8, 4, 16), dict(fsdp=2, tensor=4), ("fsdp", "tensor", None)),
    # Two key heads stay whole over four devices, and so does a vocabulary of odd size.
    (("embed", "kv_heads", "head"), (8, 2, 16), dict(fsdp=2, tensor=4), ("fsdp", None, None)),
    (("vocab", "embed"), (51, 8), dict(fsdp=8, tensor=2), (None, "fsdp")),
    # A mesh axis is taken once: experts come before the width.
    (("expert", "embed", "mlp"), (8, 8, 6), dict(fsdp=2, expert=4, tensor=2),
     ("expert", "fsdp", "tensor")),
    (("embed", "mlp"), (8, 6), dict(fsdp=2, expert=4, tensor=2), (("fsdp", "expert"), "tensor")),
    # Twelve over two leaves six, which four do not divide.
    (("embed", "mlp"), (12, 6), dict(fsdp=2, expert=4), ("fsdp", None)),
    # Ten experts over four stay whole; their widths may take the axis then.
    (("expert", "embed", "mlp"), (10, 8, 6), dict(expert=4), (None, "expert", None)),
    (("layers", "norm"), (4, 8), dict(fsdp=2, tensor=2), (None, None)),
    (("embed", "embed"), (8, 8), dict(fsdp=2), ("fsdp", None)),
    (("vocab", "embed"), (8, 8), dict(data=8), (None, None)),
])
def test_specs_by_hand(axes, shape, sizes, expected):
    assert partition_spec(axes, shape, mesh_of(**sizes)) == PartitionSpec(*expected)


def test_rules_may_be_others():
    assert partition_spec(("layers", "embed"), (4, 8), mesh_of(fsdp=4), {"layers": ("fsdp",)}) == \
        PartitionSpec("fsdp", None)


def test_names_that_do_not_fit_the_shape_are_refused():
    with pytest.raises(ValueError, match=r"2 axis names .* for an array of shape \(3,\)"):
        partition_spec(("vocab", "embed"), (3,), mesh_of())


def config_of(family):
    traits = TRAITS[family]
    return dataclasses.replace(
        ModelConfig(family, 64, 16, 24, 4, 4, 2, 8, tie_embeddings=False),
        attention_bias=traits.attention_bias, qk_norm=traits.qk_norm,
        attention_gate=traits.hybrid,
        experts=Experts(4, 2, shared_size=8) if traits.experts else None,
        delta=DeltaNet(("delta", "attention"), 2, 4, 4, 4, 4) if traits.hybrid else None)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_every_family_has_its_names(family):
    config = config_of(family)
    mesh = mesh_of(fsdp=2, expert=2, tensor=2)
    shapes = config.parameter_shapes()
    tree = shardings(parameter_axes(config), shapes, mesh)
    assert jax.tree.structure(tree) == jax.tree.structure(
        shapes, is_leaf=lambda x: isinstance(x, tuple))
    flat, names = flatten_dict(tree, sep="/"), flatten_dict(parameter_axes(config), sep="/")
    for path, shape in flatten_dict(shapes, sep="/").items():
        flat[path].shard_shape(shape)  # divides, or raises
        # Whatever touches the stream is split along it, so that no device holds all of it.
        assert ("fsdp" in str(flat[path].spec)) == ("embed" in names[path]), path
