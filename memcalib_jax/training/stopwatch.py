"""Seconds by phase."""

import time
from collections.abc import Callable


class Stopwatch:
    """Adds up the seconds of named phases; `on_phase` is told of each as it begins."""

    def __init__(self, on_phase: Callable[[str], None] | None = None):
        self._on_phase = on_phase
        self.seconds: dict[str, float] = {}
        self._phase, self._since = None, 0.0

    def phase(self, name: str | None):
        """Ends the running phase and starts `name`; None only ends."""
        now = time.perf_counter()
        if self._phase is not None:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = name, now
        if name is not None and self._on_phase is not None:
            self._on_phase(name)
