"""Checkpoints: everything a run needs to go on to the same numbers."""

import pathlib

import jax
import orbax.checkpoint as ocp

from memcalib_jax.training.state import TrainState

# Parameters are an item of their own, so that evaluation reads them without the moments.
_PARAMS, _STATE, _DATA = "params", "state", "data"


class DamagedCheckpoint(ValueError):
    """A checkpoint that cannot be read; the message says which, and what to do."""


class Checkpoints:
    """Saves and restores the training state with the place in the data, by step.

    A checkpoint whose writing was cut off is never picked up: it gets its name when it is whole.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int = 2):
        self._folder = folder
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            item_handlers={_PARAMS: ocp.StandardCheckpointHandler(),
                           _STATE: ocp.StandardCheckpointHandler(),
                           _DATA: ocp.JsonCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True))

    def latest(self) -> int | None:
        """Returns the newest whole checkpoint's step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, data_state: dict):
        """Writes a checkpoint and waits until it is whole.

        It must be whole before the next update, which reuses the state's memory.

        Raises:
          OSError: it could not be written; what is there of it is never picked up.
        """
        try:
            self._manager.save(step, args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                state=ocp.args.StandardSave(state.replace(params={})),
                data=ocp.args.JsonSave(data_state)), force=True)
            self._manager.wait_until_finished()
        except ValueError as error:  # how the storage layer says that a disk is full
            raise OSError(f"checkpoint {step} could not be written to {self._folder}: "
                          f"{str(error)[:300]}") from error

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict]:
        """Reads a checkpoint; `like` gives shapes and dtypes (`jax.eval_shape`).

        Raises:
          DamagedCheckpoint: it cannot be read.
        """
        restored = self._read(step, params=_on_device(like.params),
                              state=_on_device(like.replace(params={})),
                              data=ocp.args.JsonRestore())
        return restored[_STATE].replace(params=restored[_PARAMS]), restored[_DATA]

    def restore_params(self, step: int, like: dict) -> dict:
        """Reads a checkpoint's parameters alone; `like` gives shapes and dtypes.

        Raises:
          DamagedCheckpoint: it cannot be read.
        """
        return self._read(step, params=_on_device(like))[_PARAMS]

    def _read(self, step, **items):
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, KeyError, OSError) as error:
            raise DamagedCheckpoint(
                f"{self._folder / str(step)} cannot be read ({str(error)[:200]}); move it away "
                "to go on from the checkpoint before it") from error

    def param_shapes(self, step: int) -> dict:
        """Returns the shapes of a checkpoint's parameters, without reading them."""
        stored = self._manager.item_metadata(step)[_PARAMS]
        return jax.tree.map(lambda array: tuple(array.shape), dict(stored))

    def close(self):
        """Ends the manager's threads."""
        self._manager.close()


def _on_device(like):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return ocp.args.StandardRestore(jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like))
