"""Responses that use memories at given levels, and how a cold start gets levels wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memcalib_jax.credit import BOUND, CONTROL
from memcalib_jax.data import Record
from memcalib_jax.data.demonstrations import Demonstration
from memcalib_jax.synthetic.records import SLOTS, ideal_level, key_of, value_of
from memcalib_jax.synthetic.vocabulary import (
    BORDER, CONNECTORS, DECISION, DEFAULTS, FILLERS, KEYS, SUPPORT, TOPICS)

MAX_TOKENS = 16
"""Room for a response: 13 tokens at most in those written here, the stop token included."""

_MOST_FILLERS = 3
# Probabilities of the three levels by ideal level: usual ones, the share of (topic, key) cells
# with a bad habit, and those of a bad habit.
_HABITS = (
    ((0.975, 0.020, 0.005), 0.20, (0.60, 0.25, 0.15)),
    ((0.25, 0.68, 0.07), 0.30, (0.55, 0.25, 0.20)),
    ((0.15, 0.15, 0.70), 0.30, (0.40, 0.30, 0.30)))
_CONCENTRATION = 30.0


def write_response(record: Record, levels: Sequence[int], random: np.random.Generator) -> str:
    """Writes the response that uses a record's atoms at these levels, as far as slots allow.

    `[filler ...] choose ITEM ITEM ; since CONNECTOR ITEM CONNECTOR ITEM`: values of Control atoms
    in the decision and of Bound atoms in the support, in the order of the memory; slots that are
    left hold the topic's default words.
    """
    def items(level, defaults):
        values = [value_of(atom) for atom, used in zip(record.atoms, levels) if used == level]
        return (values + list(defaults[len(values):]))[:SLOTS]

    of_decision, of_support = DEFAULTS[record.question]
    return _write(random, items(CONTROL, of_decision), items(BOUND, of_support))


@dataclass(frozen=True)
class Habits:
    """How often each (topic, key) cell is used at each level: float64 [topics, keys, levels]."""

    probabilities: np.ndarray

    @classmethod
    def draw(cls, random: np.random.Generator) -> "Habits":
        """Draws each cell from a Dirichlet distribution around a usual or a bad habit."""
        cells = np.zeros((len(TOPICS), len(KEYS), 3))
        for t, topic in enumerate(TOPICS):
            for k, key in enumerate(KEYS):
                usual, share, bad = _HABITS[ideal_level(topic, key)]
                mean = bad if random.random() < share else usual
                cells[t, k] = random.dirichlet(_CONCENTRATION * np.array(mean))
        return cls(cells)

    def levels(self, record: Record, random: np.random.Generator) -> list[int]:
        """Draws a level for each atom of a record."""
        topic = TOPICS.index(record.question)
        return [int(random.choice(3, p=self.probabilities[topic, KEYS.index(key_of(atom))]))
                for atom in record.atoms]


def habitual(records: Sequence[Record], habits: Habits, *, seed) -> list[Demonstration]:
    """Demonstrates the habits: one response to each record."""
    random = np.random.default_rng(seed)
    return [Demonstration(record, write_response(record, habits.levels(record, random), random))
            for record in records]


def echoes(records: Sequence[Record], *, seed) -> list[Demonstration]:
    """Demonstrates copying alone: all values of a memory in any order, without slots.

    A model that has not learned to copy cannot learn when to.
    """
    random = np.random.default_rng(seed)
    demonstrations = []
    for record in records:
        values = random.permutation([value_of(atom) for atom in record.atoms])
        half = len(values) // 2
        text = _write(random, values[:half], values[half:])
        demonstrations.append(Demonstration(record, text))
    return demonstrations


def _write(random, decision, support):
    fillers = random.choice(FILLERS, random.integers(0, _MOST_FILLERS + 1))
    joined = [word for item in support for word in (random.choice(CONNECTORS), item)]
    return " ".join([*fillers, DECISION, *decision, BORDER, SUPPORT, *joined])
