"""Checkpoints: everything a run needs to go on to the same numbers."""

import pathlib

import jax
import orbax.checkpoint as ocp

from memcalib_jax.training.state import OptimizerConfig, TrainState, init_state, state_like

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

    def save(self, step: int, state: TrainState, others: dict):
        """Writes a checkpoint and waits until it is whole; `others` is JSON-able.

        It must be whole before the next update, which reuses the state's memory.

        Raises:
          OSError: it could not be written; what is there of it is never picked up.
        """
        self._save(step, params=ocp.args.StandardSave(state.params),
                   state=ocp.args.StandardSave(state.replace(params={})),
                   data=ocp.args.JsonSave(others))

    def save_params(self, step: int, params: dict, others: dict):
        """Writes a checkpoint of parameters alone, which training cannot go on from.

        Waits and raises as `save` does.
        """
        self._save(step, params=ocp.args.StandardSave(params), data=ocp.args.JsonSave(others))

    def _save(self, step, **items):
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
            self._manager.wait_until_finished()
        except ValueError as error:  # how the storage layer says that a disk is full
            raise OSError(f"checkpoint {step} could not be written to {self._folder}: "
                          f"{str(error)[:300]}") from error

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict]:
        """Reads a checkpoint, saved on whatever mesh; `like` is as `state_like` makes it.

        Raises:
          DamagedCheckpoint: it cannot be read.
        """
        restored = self._read(step, params=_placed(like.params),
                              state=_placed(like.replace(params={})),
                              data=ocp.args.JsonRestore())
        return restored[_STATE].replace(params=restored[_PARAMS]), restored[_DATA]

    def restore_params(self, step: int, like: dict) -> dict:
        """Reads a checkpoint's parameters alone; `like` gives shapes, dtypes and maybe shardings.

        Raises:
          DamagedCheckpoint: it cannot be read.
        """
        return self._read(step, params=_placed(like))[_PARAMS]

    def restore_data(self, step: int) -> dict:
        """Reads what a checkpoint holds besides parameters and state.

        Raises:
          DamagedCheckpoint: it cannot be read.
        """
        return self._read(step, data=ocp.args.JsonRestore())[_DATA]

    def delete(self, step: int):
        """Deletes a checkpoint."""
        self._manager.delete(step)

    def _read(self, step, **items):
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            # The storage layer says that files are cut off by a bare Exception.
            if not isinstance(error, (ValueError, KeyError, OSError)) and (
                    type(error) is not Exception):
                raise
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


def _placed(like):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return ocp.args.StandardRestore(jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or device), like))


def newest_state(checkpoints: Checkpoints, trained: dict, optimizer: OptimizerConfig,
                 others: dict) -> TrainState:
    """Returns the newest checkpoint's state, or a new one of the parameters `trained`.

    `others` are what else a run carries, by name; each takes its state from there (`set_state`).
    """
    latest = checkpoints.latest()
    if latest is None:
        return init_state(trained, optimizer)
    state, saved = checkpoints.restore(latest, state_like(trained, optimizer))
    for name, other in others.items():
        other.set_state(saved[name])
    return state


def states_of(others: dict) -> dict:
    """Returns the states of `others` (`get_state`) to save, as `newest_state` takes them."""
    return {name: other.get_state() for name, other in others.items()}
