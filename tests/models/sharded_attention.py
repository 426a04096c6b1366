"""Attention over bins and heads on eight CPU devices; run by test_pallas_attention."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from memcalib_jax.models.attention import Segments, attention_form, packed_attention
from memcalib_jax.parallel import make_mesh

BINS, SIZE, HEADS, KEY_HEADS, DIM = 4, 40, 4, 2, 8
# The last two: bins that do not divide over the rows' devices, heads not over those of tensor.
CASES = [dict(fsdp=4, tensor=2), dict(fsdp=1, data=2, expert=2, tensor=2), dict(fsdp=8),
         dict(fsdp=2, tensor=4)]


def segments():
    """A prompt of another length in each bin, with a response after part of it."""
    prompt = np.array([20, 13, 5, 0])[:, None]
    start, length = (np.concatenate(x, axis=1) for x in (
        (0 * prompt, prompt), (prompt, np.full((BINS, 1), 15))))
    ancestor_start = np.zeros((BINS, 2, 1), int)
    ancestor_length = np.stack([0 * prompt, prompt // 2], axis=1)
    return Segments(*(jnp.asarray(x, jnp.int32) for x in (
        start, length, ancestor_start, ancestor_length)), query_size=20)


def arrays():
    random = np.random.RandomState(0)
    return [jnp.asarray(random.standard_normal((BINS, SIZE, heads, DIM)), jnp.float32)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]


def values_and_gradients(form):
    @jax.jit
    def evaluate(q, k, v, cotangent):
        out, pull = jax.vjp(lambda *x: packed_attention(*x, (segments(),)), q, k, v)
        return out, *pull(cotangent)

    with attention_form(form):
        return evaluate(*arrays())


def main():
    alone = values_and_gradients("xla")
    for sizes in CASES:
        with jax.set_mesh(make_mesh(**sizes)):
            ours = values_and_gradients("pallas")
        for x, expected in zip(ours, alone, strict=True):
            np.testing.assert_allclose(x, expected, atol=1e-5, err_msg=str(sizes))
    print("every mesh equals one device")


if __name__ == "__main__":
    main()
