"""Meshes: sizes that are filled in, and those that are refused."""

import jax
import pytest
from jax.sharding import AxisType

from memcalib_jax.parallel import AXES, MeshError, make_mesh
from memcalib_jax.parallel.mesh import _filled


def test_the_mesh_of_one_device():
    mesh = make_mesh(devices=jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize("sizes, num_devices, filled", [
    ((2, -1, 2, 1), 16, (2, 4, 2, 1)), ((1, 1, 4, -1), 4, (1, 1, 4, 1)), ((2, 2, 1, 1), 4, None)])
def test_the_rest_is_filled_in(sizes, num_devices, filled):
    names = ("data", "fsdp", "tensor", "expert")
    assert _filled(dict(zip(names, sizes)), num_devices) == dict(zip(names, filled or sizes))


@pytest.mark.parametrize("sizes, message", [
    ({"tensor": 3}, r"mesh axes \(data 1, fsdp -1, expert 1, tensor 3\) take 3 devices, which do "
                    "not divide the 8 devices"),
    ({"fsdp": 4}, r"take 4 devices, which do not multiply to the 8 devices; set one of them to -1"),
    ({"fsdp": 16}, "take 16 devices, which do not multiply to the 8"),
    ({"tensor": 16}, "take 16 devices, which do not divide the 8"),
    ({"data": -1}, "only one mesh axis may be -1, not data and fsdp"),
    ({"expert": 0}, "mesh axis expert must be at least 1, or -1 .*, not 0"),
    ({"tensor": -2}, "mesh axis tensor must be at least 1, or -1 .*, not -2"),
])
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(MeshError, match=message):
        make_mesh(**sizes, devices=jax.devices()[:1] * 8)
