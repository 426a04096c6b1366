"""An exact judge: the use of a memory is where its value stands in the response."""

from memcalib_jax.credit import BOUND, CONTROL, IGNORE
from memcalib_jax.data import Record
from memcalib_jax.judge import AtomJudgment, Judgment
from memcalib_jax.synthetic.records import value_of
from memcalib_jax.synthetic.vocabulary import BORDER, DECISION, SUPPORT

_REASONS = {IGNORE: "its value is absent", BOUND: "its value supports the decision",
            CONTROL: "its value is in the decision, or is repeated"}


def use_levels(values: list[str], response: str) -> list[int]:
    """Reads how far a response uses each value.

    The decision is what stands from the first "choose" to the next ";" or "since", everything else
    supports it. A value in the decision controls, one elsewhere supports; a value that supports
    twice says more than support should, and controls. So no word that is added lowers a level.
    Total: any text gets an answer.
    """
    words = response.split()
    start = words.index(DECISION) + 1 if DECISION in words else len(words)
    end = next((place for place in range(start, len(words))
                if words[place] in (BORDER, SUPPORT)), len(words))
    decision, rest = words[start:end], words[:start] + words[end:]
    return [CONTROL if value in decision or rest.count(value) > 1
            else BOUND if value in rest else IGNORE for value in values]


class ExactJudge:
    """Judges as `memcalib_jax.judge.Judge` does, by the rule and at once."""

    async def judge(self, record: Record, response: str, sample_index: int = 0) -> Judgment:
        """Judges one response; `sample_index` makes no difference."""
        levels = use_levels([value_of(atom) for atom in record.atoms], response)
        details = tuple(
            AtomJudgment(atom.id, level, value_of(atom) if level else "", _REASONS[level])
            for atom, level in zip(record.atoms, levels))
        return Judgment(tuple(levels), True, None, details)
