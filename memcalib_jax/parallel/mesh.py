"""The one mesh that a program runs on."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

# Outermost first: neighbours in the last axis are neighbours in the machine, and tensor is the
# axis that talks the most.
AXES = ("data", "fsdp", "expert", "tensor")


class MeshError(ValueError):
    """Sizes of mesh axes that the devices do not allow; the message says what they allow."""


def make_mesh(*, data: int = 1, fsdp: int = -1, tensor: int = 1, expert: int = 1,
              devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh of all devices, with axes data, fsdp, expert and tensor.

    A batch is split over data, fsdp and expert; parameters over fsdp, expert and tensor; heads
    and MLP widths over tensor; experts over expert. Enter it with `jax.set_mesh(mesh)`: a mixture
    of experts looks there for its expert axis.

    Args:
      data, fsdp, tensor, expert: devices along each axis; one of them may be -1, for as many as
        the others leave.
      devices: None for all of `jax.devices()`.

    Returns:
      A mesh whose axes are all of type Auto, whatever the default of this jax version.

    Raises:
      MeshError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}
    sizes = _filled(sizes, len(devices))
    return jax.make_mesh(tuple(sizes[name] for name in AXES), AXES, devices=devices,
                         axis_types=(AxisType.Auto,) * len(AXES))


def _filled(sizes: dict[str, int], num_devices: int) -> dict[str, int]:
    """Returns the sizes with -1 replaced."""
    described = ", ".join(f"{name} {size}" for name, size in sizes.items())
    open_axes = [name for name, size in sizes.items() if size == -1]
    wrong = [name for name, size in sizes.items() if size < 1 and size != -1]
    if wrong:
        raise MeshError(f"mesh axis {wrong[0]} must be at least 1, or -1 for what the others "
                        f"leave, not {sizes[wrong[0]]}")
    if len(open_axes) > 1:
        raise MeshError(f"only one mesh axis may be -1, not {' and '.join(open_axes)}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if num_devices % fixed or (not open_axes and fixed != num_devices):
        wanted = f"divide the {num_devices} devices" if open_axes else \
            f"multiply to the {num_devices} devices; set one of them to -1 to have it fitted"
        raise MeshError(f"mesh axes ({described}) take {fixed} devices, which do not {wanted}")
    return sizes | dict.fromkeys(open_axes, num_devices // fixed)
