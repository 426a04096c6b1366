"""Running a decoder's layers in order, kinds of layers alternating in a period."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def scan_layers(pattern: tuple[str, ...], steps: dict[str, Callable], carry, scanned: dict):
    """Scans over layers whose kinds repeat `pattern`, so that programs do not grow with depth.

    Args:
      pattern: kinds of the layers of one period, in order.
      steps: for each kind, `step(carry, slices) -> (carry, outputs)` of one layer.
      carry: what goes from layer to layer.
      scanned: for each kind, a tree of arrays with a leading axis over the layers of that kind.

    Returns:
      The last carry and, for each kind, its layers' outputs stacked on a leading axis.
    """
    if len(set(pattern)) == 1:
        kind = pattern[0]
        carry, outputs = jax.lax.scan(steps[kind], carry, scanned[kind])
        return carry, {kind: outputs}
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(pattern)]
    by_period = {kind: jax.tree.map(
        lambda x: x.reshape(-1, pattern.count(kind), *x.shape[1:]), scanned[kind])
        for kind in set(pattern)}

    def one_period(carry, slices):
        outputs, at = {kind: [] for kind in steps}, dict.fromkeys(steps, 0)
        for kind, count in runs:
            run = jax.tree.map(lambda x: x[at[kind]:at[kind] + count], slices[kind])
            at[kind] += count
            carry, out = jax.lax.scan(steps[kind], carry, run)
            outputs[kind].append(out)
        return carry, {kind: jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)
                       for kind, parts in outputs.items()}

    carry, outputs = jax.lax.scan(one_period, carry, by_period)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)


def separate_layers(params: dict) -> dict:
    """Returns parameters whose layers are tuples of each layer's own arrays.

    On one CPU device these are views of the stacked arrays, which stay as they are; elsewhere
    the layers stay stacked, since compilers for accelerators fuse a slice into what reads it.
    """
    arrays = jax.tree.leaves(params)
    if not all(isinstance(x, jax.Array) and len(x.devices()) == 1 for x in arrays) or any(
            device.platform != "cpu" for x in arrays for device in x.devices()):
        return params
    return {name: _views(stacked) if name in ("layers", "delta_layers") else stacked
            for name, stacked in params.items()}


def _views(stacked):
    # `np.asarray` of the array itself would stay with it and keep it from ever being donated.
    host = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), stacked)
    count = len(jax.tree.leaves(host)[0])
    return tuple(jax.tree.map(lambda x: jax.device_put(x[i]), host) for i in range(count))


def take_layer(layers, index: int):
    """Returns layer `index` of arrays stacked over layers, or of separate layers."""
    if isinstance(layers, tuple):
        return layers[index]
    return jax.tree.map(lambda x: jax.lax.index_in_dim(x, index, keepdims=False), layers)
