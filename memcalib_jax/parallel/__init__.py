"""How arrays lie on devices: one mesh, and rules from logical axes to its axes."""

from memcalib_jax.parallel.mesh import AXES, MeshError, make_mesh
from memcalib_jax.parallel.sharding import (
    RULES, batch_sharding, gathered, partition_spec, shardings, without)

__all__ = ["AXES", "RULES", "MeshError", "batch_sharding", "gathered", "make_mesh", "partition_spec",
           "shardings", "without"]
