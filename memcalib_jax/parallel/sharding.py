"""Rules from the logical axes of parameters to the axes of a mesh."""

import functools
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Mesh axes that each logical axis is split over, as far as they are free and divide it. Others
# (layers, sizes of heads, norms) lie whole on every device: layers are scanned one by one, and
# what lies inside a head is rotated or normalized together.
RULES: Mapping[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "expert": ("expert",),
    "embed": ("fsdp", "expert"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}
BATCH = ("data", "fsdp", "expert")


def partition_spec(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh,
                   rules: Mapping[str, tuple[str, ...]] = RULES) -> PartitionSpec:
    """Returns how an array is split over a mesh.

    From the first axis to the last, each takes the mesh axes that its rule names, but for those
    that an earlier one has taken and those that do not divide what is left of it: two key heads
    stay whole over a tensor axis of four.

    Args:
      axes: logical name of each axis; names without a rule are not split.
      shape: the array's.
      mesh: sizes of the mesh axes.
      rules: mesh axes of each logical axis.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} axis names {axes} for an array of shape {shape}")
    taken, spec = set(), []
    for name, size in zip(axes, shape):
        parts = []
        for axis in rules.get(name, ()):
            ways = mesh.shape.get(axis, 1)
            if ways > 1 and axis not in taken and size % ways == 0:
                parts.append(axis)
                size //= ways
        taken.update(parts)
        spec.append(tuple(parts) if len(parts) > 1 else parts[0] if parts else None)
    return PartitionSpec(*spec)


def shardings(axes: dict, shapes: dict, mesh: Mesh,
              rules: Mapping[str, tuple[str, ...]] = RULES) -> dict:
    """Returns the `NamedSharding` of every parameter.

    Args:
      axes: tree of tuples of logical axis names.
      shapes: tree of shapes like it.
      mesh, rules: see `partition_spec`.
    """
    return jax.tree.map(
        lambda names, shape: NamedSharding(mesh, partition_spec(names, shape, mesh, rules)),
        axes, shapes, is_leaf=lambda x: isinstance(x, tuple))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns how bins, rows or prompts on a leading axis are split: over all but tensor."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def without(sharding: NamedSharding, axis: str) -> NamedSharding:
    """Returns a sharding that splits over the same axes of its mesh but one."""
    kept = [tuple(name for name in (part if isinstance(part, tuple) else (part,))
                  if name not in (axis, None)) or None for part in sharding.spec]
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


@functools.cache
def _moved(layout: tuple):
    return jax.jit(lambda *leaves: leaves, out_shardings=layout)


def gathered(params: dict, axis: str = "fsdp") -> dict:
    """Returns parameters that are no longer split over an axis of their mesh, in one program.

    Decoding reads every weight for every token: gathered once, they need not be gathered each time.
    Parameters on one device stay as they are.
    """
    leaves, structure = jax.tree.flatten(params)
    if not all(isinstance(x.sharding, NamedSharding) for x in leaves):
        return params
    return structure.unflatten(
        _moved(tuple(without(x.sharding, axis) for x in leaves))(*leaves))
