"""What does a mixture of experts cost on a TPU: products over groups, or every expert in turn?

    python -m benchmarks.experts --topology=v5e:4x4 --tokens=4096
    python -m benchmarks.experts --hidden=2048 --width=512 --num_experts=256 --per_token=8

Compiles a layer's mixture for a TPU that need not be there (`pip install libtpu` next to jax on
Linux), on one chip and over a slice with as many experts on each chip, and reads the programs:
nothing runs. The compiler counts a product over groups as if every group had every row; which
blocks of rows it skips is in the program, so that what runs is told from a drawn routing. The
default widths are those of Qwen3.5-35B-A3B. The last line is one JSON object.
"""

import importlib.util
import json
import math
import os
import re
import sys
import time

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding, PartitionSpec

from memcalib_jax.models.expert_products import ROOM, products
from memcalib_jax.parallel import make_mesh

FLAGS = flags.FLAGS
flags.DEFINE_string("topology", "v5e:4x4", "The slice, as libtpu names it.")
flags.DEFINE_integer("tokens", 4096, "Tokens of a chip.")
flags.DEFINE_integer("hidden", 2048, "Width of the residual stream.")
flags.DEFINE_integer("width", 512, "Width of an expert.")
flags.DEFINE_integer("num_experts", 256, "Experts of a layer.")
flags.DEFINE_integer("per_token", 8, "Experts of a token.")

FORMS = {"groups": True, "every expert": False}


def compile_layer(grouped, mesh, gradients):
    """Returns the program of one layer's mixture over a mesh, and the seconds it took to make."""
    rows, batch = FLAGS.tokens * mesh.size, PartitionSpec(("data", "fsdp", "expert"))
    n, d, f = FLAGS.num_experts, FLAGS.hidden, FLAGS.width

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    tokens = array((rows, d), jnp.float32, batch)
    weights, chosen = (array((rows, FLAGS.per_token), dtype, batch)
                       for dtype in (jnp.float32, jnp.int32))
    matrices = tuple(array((n, *shape), jnp.bfloat16, PartitionSpec("expert"))
                     for shape in ((d, f), (d, f), (f, d)))

    def forward(tokens, weights, chosen, matrices):
        return products(tokens, weights, chosen, matrices, grouped=grouped)

    def backward(tokens, weights, chosen, matrices, cotangent):
        return jax.grad(lambda *args: jnp.vdot(cotangent, forward(*args[:2], chosen, args[2])),
                        argnums=(0, 1, 2))(tokens, weights, matrices)

    start = time.perf_counter()
    with jax.set_mesh(mesh):
        function, args = ((backward, (tokens, weights, chosen, matrices, tokens)) if gradients
                          else (forward, (tokens, weights, chosen, matrices)))
        return jax.jit(function).lower(*args).compile(), time.perf_counter() - start


def group_products(program: str) -> list[tuple[int, int, bool]]:
    """Returns (groups, blocks of rows, whether it skips blocks) of each product over groups."""
    found = []
    for line in program.splitlines():
        if '"is_ragged_dot":true' in line and "kind=kCustom" in line:
            bounds = [int(x) for x in json.loads(
                re.search(r'"iteration_bounds":(\[[^]]*\])', line)[1])]
            dims = [int(x) for x in json.loads(
                re.search(r'"mask_dim_to_iteration_index":(\[[^]]*\])', line)[1])]
            found.append((bounds[dims[0]], bounds[dims[1]], "SKIPPER_MODE_GROUP_STARTS" in line))
    return found


def visited_blocks(sizes: np.ndarray, block: int) -> int:
    """Returns how many (group, block of rows) pairs have rows in common."""
    ends = np.cumsum(sizes)
    starts = ends - sizes
    return int(sum(-(-end // block) - start // block
                   for start, end in zip(starts, ends) if end > start))


def draw_loads(mesh) -> np.ndarray:
    """Returns tokens of each expert on the first chip, every token's experts drawn evenly."""
    random = np.random.default_rng(0)
    load = np.zeros(FLAGS.num_experts, int)
    for _ in range(mesh.shape["expert"]):
        order = random.random((FLAGS.tokens, FLAGS.num_experts)).argpartition(
            FLAGS.per_token, axis=1)
        load += np.bincount(order[:, :FLAGS.per_token].ravel(), minlength=FLAGS.num_experts)
    return load[:FLAGS.num_experts // mesh.shape["expert"]]


def measure(form, mesh, gradients):
    """Returns the figures of one program, by chip."""
    compiled, seconds = compile_layer(FORMS[form], mesh, gradients)
    cost, passes = compiled.cost_analysis(), 3 if gradients else 1
    product = 2 * FLAGS.hidden * FLAGS.width  # operations of a row in one of three products
    ideal = FLAGS.tokens * FLAGS.per_token * 3 * passes * product
    experts_here = FLAGS.num_experts // mesh.shape["expert"]
    choices = FLAGS.tokens * mesh.shape["expert"] * FLAGS.per_token
    rows = min(choices, ROOM * choices // mesh.shape["expert"])
    text = compiled.as_text()
    found = group_products(text)
    times = 1 if form == "groups" else experts_here  # the compiler counts a loop's body once
    counted = cost["flops"] * times
    if form == "groups":
        loads = draw_loads(mesh)
        runs = sum(product * block * (visited_blocks(loads, block) if skips else groups * blocks)
                   for groups, blocks, skips in found for block in [-(-rows // blocks)])
    else:
        runs = counted
    return {
        "form": form, "chips": mesh.size, "gradients": gradients,
        "counted_tflop": counted / 1e12, "runs_tflop": runs / 1e12, "ideal_tflop": ideal / 1e12,
        "runs_over_ideal": runs / ideal,
        "products_over_groups": len(found), "that_skip": sum(skips for *_, skips in found),
        "accessed_gb": cost["bytes accessed"] * times / 1e9,
        "temporary_gib": compiled.memory_analysis().temp_size_in_bytes / 2**30,
        "collective_mib": {kind: _collective_mib(text, kind)
                           for kind in ("all-gather", "reduce-scatter", "all-reduce")},
        "compile_seconds": round(seconds, 1)}


def _collective_mib(program, kind):
    sizes = {"f32": 4, "bf16": 2, "s32": 4}
    shapes = re.findall(rf"= \(?(\w+)\[([\d,]+)\][^=]*? {kind}(?:-start)?\(", program)
    return sum(sizes.get(dtype, 4) * math.prod(map(int, shape.split(",")))
               for dtype, shape in shapes) / 2**20


def main(_):
    if importlib.util.find_spec("libtpu") is None:
        sys.exit("this benchmark compiles for a TPU and needs libtpu: pip install libtpu (Linux)")
    from jax.experimental import topologies
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=FLAGS.topology).devices
    meshes = [make_mesh(devices=devices[:1])]
    if len(devices) > 1:
        meshes.append(make_mesh(fsdp=1, expert=-1, devices=devices))
    results = []
    print(f"{FLAGS.tokens} tokens a chip, {FLAGS.num_experts} experts of {FLAGS.hidden} x "
          f"{FLAGS.width}, {FLAGS.per_token} a token, bfloat16; figures of one chip\n"
          f"{'form':<13}{'chips':>6}{'pass':>10}{'counted':>10}{'runs':>8}{'ideal':>8} TFLOP"
          f"{'bytes':>9} GB{'temp':>8} GiB{'skips':>8}")
    for mesh in meshes:
        for gradients in (False, True):
            for form in FORMS:
                row = measure(form, mesh, gradients)
                results.append(row)
                skips = (f"{row['that_skip']}/{row['products_over_groups']}"
                         if form == "groups" else "-")
                print(f"{form:<13}{row['chips']:>6}{'gradient' if gradients else 'forward':>10}"
                      f"{row['counted_tflop']:>10.2f}{row['runs_tflop']:>8.2f}"
                      f"{row['ideal_tflop']:>8.2f}      {row['accessed_gb']:>9.2f}   "
                      f"{row['temporary_gib']:>8.2f}    {skips:>8}", flush=True)
    print(json.dumps({"topology": FLAGS.topology, "tokens": FLAGS.tokens, "results": results}))


if __name__ == "__main__":
    app.run(main)
