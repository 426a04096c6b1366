"""What the machine can do, and how many operations a forward takes."""

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from memcalib_jax.models import ModelConfig
from memcalib_jax.scoring.prefix_tree import Tree


def seconds(function: Callable[[], object], *, repeats: int = 3) -> list[float]:
    """Returns the seconds of each of `repeats` calls after one that is not counted."""
    jax.block_until_ready(function())
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        taken.append(time.perf_counter() - start)
    return taken


def median(values: Sequence[float]) -> float:
    """Returns the median."""
    return float(np.median(values))


def matmul_rate(dtype=jnp.float32, size: int = 2048) -> float:
    """Returns the best operations a second of a large matrix product on this machine."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))
    return 2.0 * size ** 3 / min(seconds(lambda: product(x, x), repeats=5))


def read_bandwidth(size: int = 256 * 2 ** 20) -> float:
    """Returns the best bytes a second at which this machine sums an array of `size` bytes."""
    x = jnp.ones(size // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    return x.nbytes / min(seconds(lambda: total(x), repeats=7))


def forward_operations(config: ModelConfig, tokens: int, attended: int, targets: int) -> float:
    """Returns the operations of one forward.

    Args:
      tokens: through the layers.
      attended: (query, key) pairs, summed over tokens.
      targets: through the head.
    """
    d, f, heads = config.hidden_size, config.intermediate_size, config.num_heads
    projections = d * config.head_dim * (2 * heads + 2 * config.num_kv_heads)
    layer = 2.0 * tokens * (projections + 3 * d * f) + 4.0 * attended * heads * config.head_dim
    return config.num_layers * layer + 2.0 * targets * d * config.vocab_size


def _attended(context: int, own: int) -> int:
    return own * context + own * (own + 1) // 2


def tree_operations(config: ModelConfig, trees: Sequence[Tree]) -> float:
    """Returns the operations of one forward over each tree's distinct segments."""
    segments = [segment for tree in trees for segment in tree.segments]
    leaves = [tree.segments[leaf] for tree in trees for leaf in set(tree.leaves)]
    return forward_operations(
        config, sum(len(s.tokens) for s in segments),
        sum(_attended(s.context, len(s.tokens)) for s in segments),
        sum(len(s.tokens) for s in leaves))


def dense_operations(config: ModelConfig, rows: Sequence[tuple[int, int]]) -> float:
    """Returns the operations of one forward over (prompt length, response length) rows."""
    return forward_operations(
        config, sum(p + r for p, r in rows), sum(_attended(0, p + r) for p, r in rows),
        sum(r for _, r in rows))
