"""Several processes as one program: who they are, and what they agree on.

Every process runs the same host program on the same small arrays; what is large lies on devices,
sharded over all of them. What may differ between processes, such as what their judges said or that
one was told to stop, is gathered before anybody builds on it.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

# A process that is silent for so long counts as dead, and the others are stopped.
HEARTBEAT_SECONDS = 30


class ProcessesError(RuntimeError):
    """The processes could not be joined; the message says why."""


def initialize(*, coordinator: str | None = None, num_processes: int | None = None,
               process_id: int | None = None):
    """Joins the processes of a program; must come before anything else touches devices.

    Args:
      coordinator: host:port of process 0, num_processes and process_id: how many there are and
        which this is. None: as TPU pods, Slurm and MPI say.

    Raises:
      ProcessesError: the others were not found in time, or nothing says who they are.
    """
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except (RuntimeError, ValueError) as error:
        raise ProcessesError(
            f"the processes of this program could not be joined: {str(error)[:300]}") from error


def is_main() -> bool:
    """Returns whether this is the process that writes files and talks."""
    return jax.process_index() == 0


def gather(value) -> list:
    """Returns what each process gave, in their order; every process calls it at the same place.

    Args:
      value: anything that JSON holds.
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(len(data), np.int32))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[:len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def in_main(function: Callable, *errors: type[Exception]):
    """Calls a function in the main process only, and returns what it did there, None elsewhere.

    Raises:
      Exception: of a type in `errors`, in every process, where the main process raised it.
    """
    result = error = None
    if is_main():
        try:
            result = function()
        except errors as raised:
            error = raised
    said = gather([type(error).__name__, str(error)] if error else None)[0]
    if error:
        raise error
    if said:
        kind = {kind.__name__: kind for kind in errors}.get(said[0], errors[0])
        raise kind(said[1])
    return result


def end_together(program: Callable[[], int]) -> int:
    """Returns the status of a program; where one of several processes fails, it ends at once.

    It would else wait for the others, and they for it. They find out, since it is silent.
    """
    try:
        status = program()
    except Exception:
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        print("error: this process failed, or one of the others ended and cut it off; all of them "
              "stop. The same command, started in all of them, goes on from what is saved",
              file=sys.stderr)
        status = 1
    if status and jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
