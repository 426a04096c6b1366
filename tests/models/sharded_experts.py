"""Mixtures of experts over eight CPU devices in many meshes; run by test_sharded_experts."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"


import jax
import jax.numpy as jnp
import numpy as np

from memcalib_jax.models import experts
from memcalib_jax.models.config import Experts
from memcalib_jax.parallel import make_mesh

SETTINGS = Experts(8, 3, shared_size=6)
D, F = 10, 12
# Whether tokens are sorted, how they are split, and whether all choose experts of one device,
# which has no room for as many.
CASES = [(False, dict(expert=8), False), (False, dict(expert=2, data=2), False),
         (True, dict(tensor=4), False), (True, dict(expert=4, tensor=2), False),
         (True, dict(expert=4, tensor=2), True), (True, dict(expert=2, data=2), False)]


def arrays(crowded):
    random = np.random.RandomState(0)
    n, s = SETTINGS.count, SETTINGS.shared_size
    shapes = {"router": (D, n), "expert_gate": (n, D, F), "expert_up": (n, D, F),
              "expert_down": (n, F, D), "shared_gate": (D, s), "shared_up": (D, s),
              "shared_down": (s, D), "shared_router": (D,)}
    layer = {name: jnp.asarray(random.standard_normal(shape), jnp.float32)
             for name, shape in shapes.items()}
    # 14 tokens divide over no mesh of these.
    y, probe = (jnp.asarray(random.standard_normal((2, 7, D)), jnp.float32) for _ in range(2))
    if crowded:
        y = y.at[..., 0].set(1)
        layer["router"] = layer["router"].at[0, :2].set(100)
    return y, layer, probe


def values_and_gradients(grouped, crowded):
    @jax.jit
    def evaluate(y, layer, probe):
        def loss(y, layer):
            mixed, chosen = experts.mixture(y, layer, SETTINGS, grouped=grouped)
            return jnp.vdot(probe, mixed), (mixed, chosen)
        gradients, values = jax.grad(loss, argnums=(0, 1), has_aux=True)(y, layer)
        return values, gradients

    return evaluate(*arrays(crowded))


def main():
    alone = {crowded: values_and_gradients(False, crowded) for crowded in (False, True)}
    for grouped, sizes, crowded in CASES:
        with jax.set_mesh(make_mesh(**sizes)):
            ours = values_and_gradients(grouped, crowded)
        for x, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(alone[crowded]), strict=True):
            scale = np.abs(expected).max()
            assert crowded or scale > 0.1
            np.testing.assert_allclose(x, expected, atol=2e-6 * scale, rtol=1e-5,
                                       err_msg=f"{sizes}, grouped: {grouped}, {crowded}")
    print("every mesh equals one device")


if __name__ == "__main__":
    main()
