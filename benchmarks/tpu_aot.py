"""Does a paper's model fit a TPU slice, and what would a step cost there?

    python -m benchmarks.tpu_aot --model=qwen3_8b --topology=v5e:8x8 --mesh_fsdp=8 --mesh_tensor=8
    python -m benchmarks.tpu_aot --model=qwen3_5_35b_lora --topology=v6e:4x8 --mesh_expert=32

Compiles the four programs of a training step for a slice that need not be there (`pip install
libtpu` next to jax on Linux): prefill, a block of decoding, the counterfactual pass and a
micro-batch's gradient, at the paper's lengths (prompts of up to 4,096 tokens, responses of up to
2,048, groups of 8). Nothing runs. For each it prints a chip's bytes of arguments and temporaries,
the bytes of what collectives there are by kind, and the least time that operations and bytes
take. The last line is one JSON object.
"""

import collections
import importlib.util
import json
import math
import os
import pathlib
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

from benchmarks import paper_models
from memcalib_jax.models import parameter_axes
from memcalib_jax.models.attention import FORMS, attention_form
from memcalib_jax.models.lora import LoraConfig, adapter_axes, adapter_shapes
from memcalib_jax.models.weights.config_json import read_config
from memcalib_jax.models.weights.families import flat_shapes
from memcalib_jax.parallel import make_mesh, shardings, without
from memcalib_jax.parallel.sharding import BATCH
from memcalib_jax.sampling.decode import Request, admit, decode_block, vacant_rows
from memcalib_jax.sampling.draw import Rule
from memcalib_jax.scoring import ScoringGroup
from memcalib_jax.scoring.counterfactual import pack_groups, score_batch
from memcalib_jax.scoring.packing import ScoredBatch
from memcalib_jax.training import update
from memcalib_jax.training.state import Frozen, OptimizerConfig, matrices_in, state_like

FLAGS = flags.FLAGS

# Each with its adapter's rank; 0: all parameters are trained.
MODELS = {
    "qwen3_8b": (paper_models.QWEN3_8B, 0), "ministral3_8b": (paper_models.MINISTRAL3_8B, 0),
    "qwen2_5_3b": (paper_models.QWEN25_3B, 0), "qwen2_5_7b": (paper_models.QWEN25_7B, 0),
    "qwen3_5_35b_lora": (paper_models.QWEN35_35B, 64)}
# Of a chip: memory in GiB, bfloat16 TFLOP/s and memory bandwidth in GB/s, as Google publishes them.
CHIPS = {"v5e": (16, 197, 819), "v5p": (95, 459, 2765), "v6e": (32, 918, 1640)}

STEPS = 16  # of a block of decoding

flags.DEFINE_enum("model", "qwen3_8b", list(MODELS), "The model.")
flags.DEFINE_string("topology", "v5e:8x8", "The slice, as libtpu names it.")
for _name, _size in (("data", 1), ("fsdp", -1), ("tensor", 1), ("expert", 1)):
    flags.DEFINE_integer(f"mesh_{_name}", _size, f"Devices along the mesh axis {_name}.")
flags.DEFINE_integer("prompt_tokens", 4096, "Tokens of a prompt.")
flags.DEFINE_integer("response_tokens", 2048, "Tokens of a response.")
flags.DEFINE_integer("group_size", 8, "Responses of a prompt.")
flags.DEFINE_integer("prompts", 64, "Prompts that decode at once.")
flags.DEFINE_integer("bin_tokens", 8192, "Tokens of a device's packed bin.")
flags.DEFINE_enum("remat", "layers", ["none", "elementwise", "layers"], "As in train_rl.")
flags.DEFINE_enum("attention", "auto", FORMS, "As in train_rl.")
flags.DEFINE_list("programs", ["prefill", "decode", "counterfactual", "gradient", "apply"],
                  "Which programs to compile.")


def model_config(name):
    """Returns a paper's model, and its adapter if that is what is trained."""
    published, rank = MODELS[name]
    lora = LoraConfig(rank, 2.0 * rank) if rank else None
    return read_config(published, pathlib.Path(name)), lora


def placed(shapes, layout, dtype):
    """Returns arrays without contents, laid out on the mesh."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding),
        shapes, layout, is_leaf=lambda x: isinstance(x, tuple))


def in_dtype(tree, dtype):
    """Returns `matrices_in` of arrays without contents."""
    cast = jax.eval_shape(lambda tree: matrices_in(tree, dtype), tree)
    return jax.tree.map(lambda x, like: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=like.sharding), cast, tree)


def without_fsdp(tree):
    """Returns arrays without contents as `parallel.gathered` lays them out."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=without(x.sharding, "fsdp")), tree)


def scored_batch(config, num_bins) -> ScoredBatch:
    """Returns one full bin a device: a prompt with a response, the rest filled with others."""
    prompt = FLAGS.bin_tokens // 2
    response = (FLAGS.bin_tokens - prompt) // FLAGS.group_size
    group = ScoringGroup([[1] * prompt], [[2] * response] * FLAGS.group_size,
                         [(0, g) for g in range(FLAGS.group_size)])
    packing = pack_groups(config, [group] * num_bins, (FLAGS.bin_tokens,), keep_repeats=True)
    assert len(packing.batches) == 1
    return packing.batches[0]


class Programs:
    """The programs of a step over a mesh, lowered one by one."""

    def __init__(self, config, lora, mesh):
        self.config, self.lora = config, lora
        layout = shardings(parameter_axes(config), config.parameter_shapes(), mesh)
        shapes = config.parameter_shapes()
        self.trained = placed(shapes, layout, jnp.float32)
        self.compute = in_dtype(self.trained, jnp.bfloat16)
        self.frozen = Frozen()
        if lora:
            self.frozen = Frozen(self.compute, lora)
            self.trained = placed(adapter_shapes(config, lora), shardings(
                adapter_axes(config, lora), adapter_shapes(config, lora), mesh), jnp.float32)
        self.whole = NamedSharding(mesh, PartitionSpec())
        self.rows = NamedSharding(mesh, PartitionSpec(BATCH))
        self.shards = math.prod(mesh.shape[name] for name in BATCH)

    def _array(self, shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.whole)

    def _request(self):
        key = jax.eval_shape(lambda: jax.random.key(0))
        return Request(key, Rule(1.0, None, None), self._array((8,), jnp.int32),
                       self._array((), jnp.int32))

    def _rows(self, params):
        size = dict(num_slots=FLAGS.prompts, group_size=FLAGS.group_size,
                    prompt_size=FLAGS.prompt_tokens, tail_size=FLAGS.response_tokens)
        made = vacant_rows.lower(params, self.config, **size).compile().output_shardings
        shapes = jax.eval_shape(lambda p: vacant_rows(p, self.config, **size), params)
        return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding), shapes, made)

    def prefill(self):
        params, count = without_fsdp(self.compute), self.shards
        ids = self._array((count, FLAGS.group_size), jnp.uint32)
        return admit.lower(
            params, self.config, self._rows(params), self._request(),
            self._array((count,), jnp.int32),
            self._array((count, FLAGS.prompt_tokens), jnp.int32),
            self._array((count,), jnp.int32), ids,
            self._array(ids.shape, jnp.int32))

    def decode(self):
        params = without_fsdp(self.compute)
        return decode_block.lower(params, self.config, self._rows(params), self._request(), STEPS)

    def counterfactual(self):
        return score_batch.lower(self.compute, self.config,
                                 scored_batch(self.config, self.shards), 1.0)

    def gradient(self):
        batch = scored_batch(self.config, self.shards)
        values = np.zeros(batch.targets.shape, np.float32)
        micro = update.PolicyBatch(batch, values, values, values, values > 0)
        layout = tuple(x.sharding for x in jax.tree.leaves(self.trained))
        objective = update.ObjectiveConfig(remat=FLAGS.remat)
        return update._accumulate.lower(
            self.trained, self.frozen, self.trained, micro, self.config, objective,
            update.policy_sums, layout)

    def apply(self):
        state = state_like(self.trained, OptimizerConfig())
        layout = tuple(x.sharding for x in jax.tree.leaves(state))
        return update._apply.lower(state, self.trained, self._array((), jnp.float32),
                                   OptimizerConfig(), layout)


_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
_COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|"
                         r"collective-permute)(?:-start)?\(")


def collectives(program: str) -> dict[str, int]:
    """Returns the bytes that each kind of collective makes on a chip, a scan's body once."""
    found = collections.Counter()
    for line in program.splitlines():
        match = _COLLECTIVE.search(line)
        if match:
            for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                if kind in _WIDTHS:
                    found[match[2]] += _WIDTHS[kind] * math.prod(
                        int(size) for size in shape.split(",") if size)
    return dict(found)


def collectives_of(compiled) -> dict[str, int] | None:
    """Returns the collectives of a program; None where this jaxlib cannot print it."""
    try:
        return collectives(compiled.as_text())
    except jax.errors.JaxRuntimeError:  # the compiler may be newer than the printer
        return None


def least_seconds(name, programs, mesh) -> float:
    """Returns the least time of a program on a chip: its operations, or for decoding its bytes."""
    _, peak, bandwidth = CHIPS[FLAGS.topology.split(":")[0]]
    config, tensor = programs.config, mesh.shape["tensor"]
    if name == "apply":  # masters and two moments are read and written, gradients read
        held = sum(math.prod(x.shape) for x in jax.tree.leaves(programs.trained)) / mesh.size
        return 7 * 4 * held / (bandwidth * 1e9)
    if name == "decode":
        weights = sum(math.prod(x.shape) for x in jax.tree.leaves(programs.compute)) * 2 / tensor
        heads = sum(kind == "attention" for kind in config.layer_kinds) * config.num_kv_heads
        seen = FLAGS.prompt_tokens + FLAGS.group_size * FLAGS.response_tokens
        cache = 2 * 2 * heads * config.head_dim * seen * FLAGS.prompts / mesh.size
        return STEPS * (weights + cache) / (bandwidth * 1e9)
    if name == "prefill":
        tokens, targets = FLAGS.prompt_tokens, FLAGS.group_size
        attended = tokens * tokens // 2
    else:
        tokens, prompt = FLAGS.bin_tokens, FLAGS.bin_tokens // 2
        targets = tokens - prompt
        attended = prompt * prompt // 2 + targets * (prompt + targets // FLAGS.group_size // 2)
    passes = {"gradient": 4 if FLAGS.remat == "layers" else 3}.get(name, 1)
    heads = sum(kind == "attention" for kind in config.layer_kinds) * config.num_heads
    operations = (2.0 * tokens * active_parameters(config) + 4.0 * attended * heads
                  * config.head_dim + 2.0 * targets * config.hidden_size * config.vocab_size)
    return passes * operations / tensor / (peak * 1e12)


def active_parameters(config) -> float:
    """Returns how many of the layers' parameters a token meets."""
    share = config.experts.per_token / config.experts.count if config.experts else 1.0
    return sum(math.prod(shape) * (share if "/expert_" in path else 1.0)
               for path, shape in flat_shapes(config).items() if "layers/" in path)


def main(_):
    if importlib.util.find_spec("libtpu") is None:
        sys.exit("libtpu is not installed, whose compiler this needs: pip install libtpu")
    from jax.experimental import topologies
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=FLAGS.topology).devices
    mesh = make_mesh(data=FLAGS.mesh_data, fsdp=FLAGS.mesh_fsdp, tensor=FLAGS.mesh_tensor,
                     expert=FLAGS.mesh_expert, devices=devices)
    config, lora = model_config(FLAGS.model)
    memory, _, _ = CHIPS[FLAGS.topology.split(":")[0]]
    print(f"{FLAGS.model} on {FLAGS.topology}, {len(devices)} chips of {memory} GiB, mesh "
          f"{dict(mesh.shape)}; GiB of a chip\n"
          f"{'program':<16}{'arguments':>10}{'temporaries':>12}{'fits':>6}{'collectives':>13}"
          f"{'least time':>12}{'compiled in':>13}", flush=True)
    results = []
    with jax.set_mesh(mesh), attention_form(FLAGS.attention):
        programs = Programs(config, lora, mesh)
        for name in FLAGS.programs:
            start = time.perf_counter()
            try:
                compiled = getattr(programs, name)().compile()
            except jax.errors.JaxRuntimeError as error:
                said = str(error).splitlines()[0]
                print(f"{name:<16}does not compile: {said[:300]}", flush=True)
                results.append({"program": name, "error": said})
                continue
            stats = compiled.memory_analysis()
            arguments, temporaries = (x / 2**30 for x in (
                stats.argument_size_in_bytes, stats.temp_size_in_bytes))
            extra = max(0, stats.output_size_in_bytes - stats.alias_size_in_bytes) / 2**30
            row = {"program": name, "arguments_gib": arguments, "temporaries_gib": temporaries,
                   "outputs_gib": extra, "fits": arguments + temporaries + extra <= memory,
                   "collective_bytes": collectives_of(compiled),
                   "least_seconds": least_seconds(name, programs, mesh),
                   "seconds_to_compile": time.perf_counter() - start}
            results.append(row)
            sent = row["collective_bytes"]
            sent = "-" if sent is None else f"{sum(sent.values()) / 2**30:.2f}"
            print(f"{name:<16}{arguments:>10.2f}{temporaries:>12.2f}"
                  f"{'yes' if row['fits'] else 'no':>6}"
                  f"{sent:>13}"
                  f"{row['least_seconds']:>10.3f} s{row['seconds_to_compile']:>11.0f} s",
                  flush=True)
    print(json.dumps({"model": FLAGS.model, "topology": FLAGS.topology, "jax": jax.__version__,
                      "mesh": dict(mesh.shape), "attention": FLAGS.attention,
                      "results": results}))


if __name__ == "__main__":
    app.run(main)
