"""A machine that is taken away says so first: what has been done is saved then."""

import signal

from memcalib_jax.parallel import multihost

# EX_TEMPFAIL of sysexits.h: try the same again.
EXIT_CODE = 75


class Preempted(RuntimeError):
    """The run was told to stop; the message says what is saved."""


class StopSignal:
    """Notes that this process was sent SIGTERM, instead of dying of it.

    A context manager: the former handler is back afterwards.
    """

    def __init__(self):
        self._received = False

    def agreed(self) -> bool:
        """Returns whether any process was told to stop; all of them call it at the same place."""
        return any(multihost.gather(self._received))

    def __enter__(self) -> "StopSignal":
        self._former = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exception):
        signal.signal(signal.SIGTERM, self._former)

    def _note(self, *_):
        self._received = True
