"""Which devices and processes a program runs on."""

import contextlib
import os
import sys

import jax
from absl import flags

from memcalib_jax.models import ModelConfig, parameter_axes
from memcalib_jax.models.attention import FORMS, attention_form
from memcalib_jax.models.lora import LoraConfig, adapter_axes, adapter_shapes
from memcalib_jax.parallel import make_mesh, multihost, shardings

FLAGS = flags.FLAGS

# They change no number of a step by more than rounding.
MAY_CHANGE = ("mesh_data", "mesh_fsdp", "mesh_tensor", "mesh_expert", "attention", "multihost",
              "coordinator", "num_processes", "process_id")


def define_flags():
    """Defines the flags that say how arrays are spread over devices, and which processes join."""
    flags.DEFINE_integer("mesh_data", 1, "Devices that rows alone are split over; -1: what the "
                         "other axes leave.")
    flags.DEFINE_integer("mesh_fsdp", -1, "Devices that rows and parameters are split over.")
    flags.DEFINE_integer("mesh_tensor", 1, "Devices that heads, MLP widths and the vocabulary are "
                         "split over.")
    flags.DEFINE_integer("mesh_expert", 1, "Devices that rows, parameters and experts are split "
                         "over.")
    flags.DEFINE_enum("attention", "auto", FORMS, "What attention of known tokens is made of: "
                      "TPU kernels (pallas; interpreted elsewhere, slow and for checks), XLA's own "
                      "operations, or kernels on TPUs alone.")
    flags.DEFINE_bool("multihost", False, "Join the processes that a TPU pod, Slurm or MPI has "
                      "started with this command, one a host.")
    flags.DEFINE_string("coordinator", None, "host:port of process 0, where nothing else says who "
                        "belongs together; with --num_processes and --process_id.")
    flags.DEFINE_integer("num_processes", None, "Processes of this program.", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "Which of them this is.", lower_bound=0)


@contextlib.contextmanager
def entered():
    """Joins the processes of the flags and enters the mesh; all but the first fall silent.

    Where there is only one device there is no mesh; without these flags nothing happens. The form
    of attention is entered, too.

    Raises:
      ProcessesError: flags that contradict each other, or the other processes were not found.
      MeshError: the sizes do not fit the devices.
    """
    if "mesh_data" not in FLAGS:
        yield
        return
    by_hand = (FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)
    if any(value is not None for value in by_hand) and None in by_hand:
        raise multihost.ProcessesError(
            "--coordinator, --num_processes and --process_id go together")
    if FLAGS.multihost or FLAGS.coordinator:
        multihost.initialize(coordinator=FLAGS.coordinator, num_processes=FLAGS.num_processes,
                             process_id=FLAGS.process_id)
        if not multihost.is_main():
            sys.stdout = open(os.devnull, "w", encoding="utf-8")
    mesh = make_mesh(data=FLAGS.mesh_data, fsdp=FLAGS.mesh_fsdp, tensor=FLAGS.mesh_tensor,
                     expert=FLAGS.mesh_expert)
    with (jax.set_mesh(mesh) if mesh.size > 1 else contextlib.nullcontext(),
          attention_form(FLAGS.attention)):
        yield


def parameter_shardings(config: ModelConfig, lora: LoraConfig | None = None) -> dict:
    """Returns how the parameters of a model, or of an adapter to it, lie: on the mesh, if any."""
    if lora:
        axes, shapes = adapter_axes(config, lora), adapter_shapes(config, lora)
    else:
        axes, shapes = parameter_axes(config), config.parameter_shapes()
    mesh = jax.sharding.get_mesh()
    if not mesh.empty:
        return shardings(axes, shapes, mesh)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda _: device, shapes, is_leaf=lambda x: isinstance(x, tuple))
