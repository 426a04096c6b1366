"""Checkpoints: everything a run needs to go on to the same numbers."""

import pathlib

import jax
import orbax.checkpoint as ocp

from memcalib_jax.training.state import TrainState

# Parameters are an item of their own, so that evaluation reads them without the moments.
_PARAMS, _STATE, _DATA = "params", "state", "data"


class Checkpoints:
    """Saves and restores the training state with the place in the data, by step.

    A checkpoint whose writing was cut off is never picked up: it gets its name when it is whole.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int = 2):
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
        """
        self._manager.save(step, args=ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            state=ocp.args.StandardSave(state.replace(params={})),
            data=ocp.args.JsonSave(data_state)), force=True)
        self._manager.wait_until_finished()

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict]:
        """Reads a checkpoint; `like` gives shapes and dtypes (`jax.eval_shape`)."""
        restored = self._manager.restore(step, args=ocp.args.Composite(
            params=_on_device(like.params), state=_on_device(like.replace(params={})),
            data=ocp.args.JsonRestore()))
        return restored[_STATE].replace(params=restored[_PARAMS]), restored[_DATA]

    def restore_params(self, step: int, like: dict) -> dict:
        """Reads a checkpoint's parameters alone; `like` gives shapes and dtypes."""
        return self._manager.restore(
            step, args=ocp.args.Composite(params=_on_device(like)))[_PARAMS]

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
