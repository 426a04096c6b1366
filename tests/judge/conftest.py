import pytest

from memcalib_jax.data import Atom, Block, Record


@pytest.fixture
def record():
    """Two blocks and three atoms with the ideal levels Control, Ignore and Bound."""
    atoms = (
        Atom("a1", "m1", "The user has a diagnosed peanut allergy.", 2, "apply", {"over_use": "x"}),
        Atom("a2", "m1", "The user's nephew plays the trombone.", 0, "ignore", {"over_use": "y"}),
        Atom("a3", "m2", "The user likes crunchy food.", 1, "apply", {"over_use": "z"}),
    )
    joined = f"{atoms[0].text} {atoms[1].text}"
    blocks = (
        Block("m1", "Peanuts are out; a nephew plays.", joined, ("a1", "a2")),
        Block("m2", "They like a crunch.", atoms[2].text, ("a3",)),
    )
    return Record("r", "general", "What could I snack on?", blocks, atoms)
