"""How a forward lies on the mesh that it is traced under (`jax.set_mesh`).

The axes are those of `parallel.make_mesh`: bins, rows and prompts are split over all but "tensor",
heads and the vocabulary over "tensor". Without a mesh everything is computed in place.
"""

import math
from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

TENSOR = "tensor"


def current_mesh() -> AbstractMesh | None:
    """Returns the mesh; None where there is none, or where shard_map has taken it apart."""
    mesh = jax.sharding.get_abstract_mesh()
    if TENSOR not in mesh.axis_names or AxisType.Manual in mesh.axis_types:
        return None
    return mesh


def platform() -> str:
    """Returns what a program being traced is for: the mesh's devices, or the default ones."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def row_axes(mesh: AbstractMesh) -> tuple[str, ...]:
    """Returns the axes that rows are split over."""
    return tuple(name for name in mesh.axis_names if name != TENSOR)


def num_row_shards() -> int:
    """Returns over how many devices rows are split: what numbers of bins and rows should divide."""
    mesh = current_mesh()
    return math.prod(mesh.shape[name] for name in row_axes(mesh)) if mesh else 1


def rows_spec(count: int) -> tuple[str, ...] | None:
    """Returns how an axis of `count` bins, rows or prompts is split; None where it stays whole."""
    mesh = current_mesh()
    return row_axes(mesh) if mesh and count % num_row_shards() == 0 else None


def tensor_spec(count: int) -> str | None:
    """Returns how an axis of `count` heads or tokens of the vocabulary is split."""
    mesh = current_mesh()
    return TENSOR if mesh and count % mesh.shape[TENSOR] == 0 else None


def constrained(x: jax.Array, *spec) -> jax.Array:
    """Returns `x` laid out by a partition spec; as it is without a mesh."""
    if current_mesh() is None:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def whole(tree):
    """Returns arrays that lie whole on every device, so that every process may read them."""
    return jax.tree.map(constrained, tree)


def on_shards(function: Callable, in_specs, out_specs, *, check_vma: bool = True) -> Callable:
    """Returns the function of each device's own part, as `jax.shard_map`; itself without a mesh."""
    if current_mesh() is None:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def varying(x: jax.Array, axes: tuple[str, ...] | None) -> jax.Array:
    """Returns `x`, the same on the devices along `axes`, so that gradients are summed over them."""
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def layout_of(tree) -> tuple | None:
    """Returns how a tree's arrays lie, hashable, for `laid_out`; None without a mesh."""
    if current_mesh() is None:
        return None
    return tuple(x.sharding for x in jax.tree.leaves(tree))


def laid_out(tree, layout: tuple | None):
    """Returns, under jit, a tree whose arrays lie as those that `layout_of` was told of."""
    if layout is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(map(jax.lax.with_sharding_constraint, leaves, layout))
