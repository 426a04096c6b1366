"""Which programs were compiled, and how long that took."""

import collections
import threading

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
# Below this a program is an odd conversion or slice, not one of ours.
LONG = 0.1


class CompileLog:
    """Collects the programs that this process compiles, or takes from the persistent cache."""

    def __init__(self):
        self._programs: list[tuple[str, float]] = []
        self._lock = threading.Lock()  # other threads compile too
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, fun_name: str = "?", **_):
        if event == _EVENT:
            with self._lock:
                self._programs.append((fun_name.removeprefix("jit(").removesuffix(")"), seconds))

    def take(self) -> "Compiled":
        """Returns what was compiled since the last call."""
        with self._lock:
            programs, self._programs = self._programs, []
        return Compiled(programs)


class Compiled:
    """Programs by name, with their seconds."""

    def __init__(self, programs: list[tuple[str, float]]):
        self._programs = programs

    def metrics(self) -> dict[str, float]:
        """Returns the number of programs that took long, and the seconds of all."""
        return {"time/programs_compiled": float(sum(s >= LONG for _, s in self._programs)),
                "time/compile": sum(seconds for _, seconds in self._programs)}

    def __str__(self) -> str:
        """Names those that took long, with how many of each; empty if there were none."""
        names = collections.Counter(name for name, seconds in self._programs if seconds >= LONG)
        if not names:
            return ""
        listed = ", ".join(name + (f" x{count}" if count > 1 else "")
                           for name, count in sorted(names.items()))
        seconds = sum(seconds for _, seconds in self._programs)
        return f"{names.total()} programs compiled in {seconds:.1f} s: {listed}"
