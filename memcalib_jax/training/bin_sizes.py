"""Sizes that a run's bins may have, fixed after the first steps: each is a program to compile."""

import dataclasses

from memcalib_jax.scoring.bins import bin_sizes

# A run's lengths have shown themselves by then; a later program would stop every device again.
STEPS_TO_LEARN = 3


@dataclasses.dataclass
class UsedSizes:
    """The sizes that bins had in the counterfactual pass and in the training layout."""

    scoring: set[int] = dataclasses.field(default_factory=set)
    training: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class BinSizes:
    """The sizes that bins may have, ascending, in the two passes."""

    scoring: tuple[int, ...]
    training: tuple[int, ...]

    @classmethod
    def of(cls, bin_tokens: int) -> "BinSizes":
        """Returns every size that bins of at most about `bin_tokens` tokens may have."""
        return cls(bin_sizes(bin_tokens), bin_sizes(bin_tokens))


class SizeTable:
    """What a run knows of its bins' sizes; the state goes into its checkpoints."""

    def __init__(self, bin_tokens: int):
        self._all = BinSizes.of(bin_tokens)
        self._used = UsedSizes()

    def allowed(self, step: int) -> BinSizes:
        """Returns the sizes for a step: all at first, later those that were used by then."""
        if step <= STEPS_TO_LEARN:
            return self._all
        return BinSizes(tuple(sorted(self._used.scoring)) or self._all.scoring,
                        tuple(sorted(self._used.training)) or self._all.training)

    def note(self, used: UsedSizes):
        """Adds the sizes that a step used."""
        self._used.scoring |= used.scoring
        self._used.training |= used.training

    def get_state(self) -> dict[str, list[int]]:
        """Returns the used sizes in JSON's terms."""
        return {name: sorted(sizes) for name, sizes in vars(self._used).items()}

    def set_state(self, state: dict[str, list[int]]):
        """Takes what `get_state` returned."""
        self._used = UsedSizes(**{name: set(sizes) for name, sizes in state.items()})
