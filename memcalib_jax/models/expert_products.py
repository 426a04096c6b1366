"""The products of a mixture: what each token's experts make of it, weighted and summed.

No token is dropped. Where matrix products over groups of unequal size are fast, tokens are
sorted by expert and each expert sees its own; on a CPU every expert sees every token, and what
the router did not choose counts 0. Both give the same result.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from memcalib_jax.models import layers
from memcalib_jax.models.on_mesh import current_mesh, num_row_shards, row_axes


def sorted_by_expert(tokens: jax.Array, weights: jax.Array, chosen: jax.Array,
                     matrices: tuple[jax.Array, jax.Array, jax.Array], *,
                     room: int | None = None) -> jax.Array:
    """Returns each token's weighted sum over its experts, by products over groups of tokens.

    Args:
      tokens: float `[M, D]`.
      weights: float32 `[M, k]`.
      chosen: int32 `[M, k]`; numbers outside of 0 .. E - 1 are experts that add nothing.
      matrices: gate and up `[E, D, F]`, down `[E, F, D]`.
      room: rows to reserve for what the E experts are chosen for, since most of the M k choices
        may be of others; where there are more, `one_expert_at_a_time` takes over. None: M k.

    Returns:
      float32 `[M, D]`.
    """
    num_experts, per_token = len(matrices[0]), chosen.shape[1]
    here = (chosen >= 0) & (chosen < num_experts)
    # Experts that are not here come last, in no group.
    number = jnp.where(here, chosen, num_experts).reshape(-1)
    order = jnp.argsort(number, stable=True)
    sizes = jnp.sum(number[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)

    def every_row(tokens, weights, matrices):
        inverse = jnp.argsort(order)
        copies = jnp.repeat(tokens, per_token, axis=0)  # whose gradients are summed in its dtype
        x = _permuted(copies.astype(matrices[0].dtype), order, inverse)
        out = _permuted(_by_group(x, sizes, matrices), inverse, order)
        return jnp.sum(out.reshape(*chosen.shape, -1) * weights[..., None], axis=1)

    def first_rows(tokens, weights, matrices):
        kept = order[:room]
        x = _rows(tokens, kept // per_token).astype(matrices[0].dtype)
        out = _by_group(x, sizes, matrices) * weights.reshape(-1)[kept][:, None]
        return jnp.zeros_like(tokens, jnp.float32).at[kept // per_token].add(out)

    if room is None or room >= len(order):
        return every_row(tokens, weights, matrices)
    return jax.lax.cond(
        sizes.sum() <= room, first_rows,
        lambda tokens, weights, matrices: one_expert_at_a_time(tokens, weights, chosen, matrices),
        tokens, weights, matrices)


def _by_group(x, sizes, matrices):
    """Returns the outputs of experts whose rows `x` lie one after another; 0 after the last."""
    gate, up, down = matrices
    in_group = (jnp.arange(len(x)) < sizes.sum())[:, None]

    def product(x, matrix):
        y = jax.lax.ragged_dot(
            x.astype(matrix.dtype), matrix, sizes, precision=layers.product_precision(matrix),
            preferred_element_type=jnp.float32)
        return jnp.where(in_group, y, 0.0)  # rows of no group may hold anything

    return product(jax.nn.silu(product(x, gate)) * product(x, up), down)


@jax.custom_vjp
def _permuted(x, order, inverse):
    """Returns the rows `x[order]`; with the inverse at hand, the gradient needs no scatter."""
    return x[order]


_permuted.defvjp(lambda x, order, inverse: (x[order], inverse),
                 lambda inverse, cotangent: (cotangent[inverse], None, None))


@jax.custom_vjp
def _rows(tokens, index):
    """Returns `tokens[index]`; gradients of a token taken several times are summed in float32."""
    return tokens[index]


def _add_rows(residuals, cotangent):
    like, index = residuals
    sums = jnp.zeros_like(like, jnp.float32).at[index].add(cotangent.astype(jnp.float32))
    return sums.astype(like.dtype), None


_rows.defvjp(lambda tokens, index: (tokens[index], (tokens, index)), _add_rows)


def one_expert_at_a_time(tokens: jax.Array, weights: jax.Array, chosen: jax.Array,
                         matrices: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """Returns what `sorted_by_expert` does, by products of every expert with every token."""
    @jax.checkpoint
    def add_expert(total, scanned):
        number, expert = scanned
        weight = jnp.sum(jnp.where(chosen == number, weights, 0.0), axis=1)
        return total + weight[:, None] * layers.gated(tokens, expert), None

    stacked = dict(zip(("gate", "up", "down"), matrices))
    total, _ = jax.lax.scan(add_expert, jnp.zeros_like(tokens, jnp.float32),
                            (jnp.arange(len(matrices[0])), stacked))
    return total


# A device keeps room for so many times its even share of the choices.
ROOM = 2


def products(tokens: jax.Array, weights: jax.Array, chosen: jax.Array,
             matrices: tuple[jax.Array, jax.Array, jax.Array], *, grouped: bool) -> jax.Array:
    """Returns each token's weighted sum over its experts, computed where the experts lie.

    Under `jax.set_mesh` of a mesh of `parallel.make_mesh`, experts are split over its axis
    "expert" and their widths over "tensor"; tokens are split over all axes but "tensor". Each
    device gathers the tokens of its expert axis, passes them through its own experts, and the
    sums go back to where the tokens lie: no token is dropped, whatever the router chooses.
    Without a mesh everything is computed in place.

    Args: as `sorted_by_expert`, which `grouped` chooses instead of `one_expert_at_a_time`.
    """
    mesh = current_mesh()
    if mesh is None:
        form = sorted_by_expert if grouped else one_expert_at_a_time
        return form(tokens, weights, chosen, matrices)
    rows = PartitionSpec(row_axes(mesh))
    wide, down = PartitionSpec("expert", None, "tensor"), PartitionSpec("expert", "tensor")

    @functools.partial(jax.shard_map, out_specs=rows, in_specs=(
        rows, rows, rows, (wide, wide, down)))
    def local(tokens, weights, chosen, matrices):
        tokens = _gathered(tokens, matrices[0].dtype)
        weights, chosen = (jax.lax.all_gather(x, "expert", tiled=True) for x in (weights, chosen))
        first = jax.lax.axis_index("expert") * len(matrices[0])
        inputs = jax.lax.pcast((tokens, weights, chosen - first), "tensor", to="varying")
        room = math.ceil(ROOM * chosen.size / mesh.shape["expert"])
        sums = (sorted_by_expert(*inputs, matrices, room=room) if grouped else
                one_expert_at_a_time(*inputs, matrices))
        sums = jax.lax.psum_scatter(sums, "expert", tiled=True)
        return jax.lax.psum(sums, "tensor")

    size = len(tokens)
    lacking = -size % num_row_shards()
    tokens, weights, chosen = (
        jnp.pad(x, ((0, lacking), (0, 0)), constant_values=fill)
        for x, fill in ((tokens, 0), (weights, 0), (chosen, -1)))
    return local(tokens, weights, chosen, matrices)[:size]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(tokens, dtype):
    """Returns all tokens of the expert axis, sent in the products' dtype.

    Their gradients are summed in float32.
    """
    return jax.lax.all_gather(tokens.astype(dtype), "expert", tiled=True)


_gathered.defvjp(
    lambda tokens, dtype: (_gathered(tokens, dtype), None),
    lambda dtype, _, cotangent: (jax.lax.psum_scatter(
        cotangent.astype(jnp.float32), "expert", tiled=True),))
