"""Seconds by phase."""

import time


class Stopwatch:
    """Adds up the seconds of named phases."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._phase, self._since = None, 0.0

    def phase(self, name: str | None):
        """Ends the running phase and starts `name`; None only ends."""
        now = time.perf_counter()
        if self._phase is not None:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = name, now
