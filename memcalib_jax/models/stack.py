"""Running a decoder's layers in order, kinds of layers alternating in a period."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp


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


def take_layer(stacked, index):
    """Returns layer `index` of a tree of arrays stacked over layers."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)
