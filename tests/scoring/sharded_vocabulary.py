"""Spread a vocabulary over eight CPU devices and compare with one; run by test_log_probs."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from memcalib_jax.scoring import log_probs
from memcalib_jax.scoring.log_probs import token_log_probs

log_probs.VOCABULARY_BLOCK, log_probs.ROW_TILE = 8, 4

ROWS, WIDTH, VOCABULARY, TEMPERATURE = 12, 6, 88, 0.7
WEIGHTS = np.linspace(-1.0, 2.0, ROWS, dtype=np.float32)


def value_and_gradients(function, hidden, head):
    def loss(hidden, head):
        values, entropy = function(hidden, head)
        return jnp.sum(WEIGHTS * (values + 0.3 * entropy)), (values, entropy)

    (_, results), gradients = jax.jit(
        jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, head)
    return *results, *gradients


def sharded(devices, rows, targets):
    """Returns token_log_probs over a mesh, rows of hidden spread as `rows` says."""
    mesh = Mesh(np.array(jax.devices()).reshape(devices), ("data", "model"),
                axis_types=(AxisType.Auto, AxisType.Auto))

    def local(hidden, head, targets):
        if rows:
            head = jax.lax.pcast(head, "data", to="varying")
        return token_log_probs(hidden, head, targets, TEMPERATURE, axis_name="model")

    spread = jax.shard_map(local, mesh=mesh, in_specs=(rows, PartitionSpec("model"), rows),
                           out_specs=(rows, rows))
    return lambda hidden, head: spread(hidden, head, targets)


def main():
    assert len(jax.devices()) == 8
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    head = rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
    targets = rng.integers(0, VOCABULARY, ROWS).astype(np.int32)
    whole = value_and_gradients(
        lambda hidden, head: token_log_probs(hidden, head, targets, TEMPERATURE), hidden, head)
    for devices, rows in (((1, 8), PartitionSpec()), ((2, 4), PartitionSpec()),
                          ((2, 4), PartitionSpec("data"))):
        result = value_and_gradients(sharded(devices, rows, targets), hidden, head)
        for got, expected in zip(result, whole, strict=True):
            np.testing.assert_allclose(got, expected, atol=4e-6, rtol=2e-6)
    print("sharded equals whole")


if __name__ == "__main__":
    main()
