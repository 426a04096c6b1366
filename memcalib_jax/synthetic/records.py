"""Records of the slots benchmark: memories whose right use a hidden rule decides."""

from collections.abc import Sequence

import numpy as np

from memcalib_jax.credit import BOUND, CONTROL, IGNORE
from memcalib_jax.data import Atom, Block, Record
from memcalib_jax.synthetic.vocabulary import KEYS, TOPICS, VALUES

SLOTS = 2
"""Items of a section of the response: no more atoms of a record control, or support."""

_KEYS_OF_A_LEVEL = 3
_COUNTS = (0.15, 0.55, 0.30)  # of 0, 1 and 2 atoms of one level
_MOST_ATOMS, _FEWEST_ATOMS = 11, 8
_ACTIONS = {IGNORE: "ignore", BOUND: "apply", CONTROL: "apply"}


def ideal_level(topic: str, key: str) -> int:
    """Returns how far an atom about `key` should shape an answer about `topic`.

    The hidden rule: of the keys from the topic's own on, three control and the next three support;
    the others are to be ignored.
    """
    distance = (KEYS.index(key) - _KEYS_OF_A_LEVEL * TOPICS.index(topic)) % len(KEYS)
    if distance < _KEYS_OF_A_LEVEL:
        return CONTROL
    return BOUND if distance < 2 * _KEYS_OF_A_LEVEL else IGNORE


def key_of(atom: Atom) -> str:
    """Returns what an atom is about."""
    return atom.text.split()[0]


def value_of(atom: Atom) -> str:
    """Returns the word that shows an atom's use."""
    return atom.text.split()[1]


def draw_records(count: int, *, seed: int | Sequence[int], name: str) -> list[Record]:
    """Draws records: 8 to 11 atoms in 3 or 4 blocks, about three quarters of them to be ignored.

    Args:
      count: how many.
      seed: of the draw.
      name: begins the ids.
    """
    random = np.random.default_rng(seed)
    return [_draw(random, f"{name}-{number}") for number in range(count)]


def _draw(random: np.random.Generator, record_id: str) -> Record:
    topic = str(random.choice(TOPICS))
    total = random.integers(_FEWEST_ATOMS, _MOST_ATOMS + 1)
    counts = {level: random.choice(len(_COUNTS), p=_COUNTS) for level in (CONTROL, BOUND)}
    counts[IGNORE] = total - sum(counts.values())
    keys = [key for level, number in counts.items() for key in random.choice(
        [key for key in KEYS if ideal_level(topic, key) == level], number, replace=False)]
    blocks, atoms = [], []
    edges = np.sort(random.choice(
        np.arange(1, total), random.integers(3, 5) - 1, replace=False))
    for number, part in enumerate(np.split(random.permutation(keys), edges), start=1):
        block_id = f"m{number}"
        mine = [_atom(random, topic, str(key), f"a{len(atoms) + place}", block_id)
                for place, key in enumerate(part, start=1)]
        text = " ".join(atom.text for atom in mine)
        blocks.append(Block(block_id, text, text, tuple(atom.id for atom in mine)))
        atoms += mine
    return Record(record_id, "general", topic, tuple(blocks), tuple(atoms))


def _atom(random, topic, key, atom_id, block_id):
    level = ideal_level(topic, key)
    return Atom(atom_id, block_id, f"{key} {random.choice(VALUES[key])}", level, _ACTIONS[level],
                {})
