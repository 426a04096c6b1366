"""Stages of training, each on more sessions than the one before: Memory-R2, 3.4."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stage:
    """Trains on the first `sessions` sessions for at most `steps` steps."""

    sessions: int
    steps: int


PAPER = (Stage(8, 10), Stage(16, 5), Stage(32, 5))


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Reads stages such as "8:10,16:5,32:5", sessions and steps.

    Raises:
      ValueError: no stage, one of another form, or sessions that do not rise.
    """
    stages = []
    for part in text.split(","):
        numbers = part.split(":")
        if len(numbers) != 2 or not all(n.strip().isascii() and n.strip().isdigit()
                                        and int(n) > 0 for n in numbers):
            raise ValueError(f"a stage is SESSIONS:STEPS, both at least 1, not {part.strip()!r}")
        stages.append(Stage(*map(int, numbers)))
    for before, after in zip(stages, stages[1:]):
        if before.sessions >= after.sessions:
            raise ValueError(f"each stage must have more sessions than the one before, but "
                             f"{after.sessions} follows {before.sessions}")
    return tuple(stages)


class Patience:
    """Follows validations: which is the best, and whether to stop.

    Of equal values the first is the best. One that is no number is no gain.
    """

    def __init__(self, most_without_gain: int):
        self._most = most_without_gain
        self.best_step: int | None = None
        self._best, self._without = float("-inf"), 0

    @property
    def exhausted(self) -> bool:
        """Whether as many validations in a row as allowed brought no gain."""
        return self._without >= self._most

    def gains(self, step: int, value: float) -> bool:
        """Takes a validation; returns whether it is the best so far."""
        if value > self._best:
            self._best, self.best_step, self._without = value, step, 0
            return True
        self._without += 1
        return False

    def get_state(self) -> dict:
        """Returns what it knows, in JSON's terms."""
        best = None if self.best_step is None else self._best
        return {"best": best, "best_step": self.best_step, "without": self._without}

    def set_state(self, state: dict):
        """Takes what `get_state` returned."""
        self._best = float("-inf") if state["best"] is None else state["best"]
        self.best_step, self._without = state["best_step"], state["without"]
