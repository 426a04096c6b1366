import numpy as np
import pytest

from memcalib_jax.credit import BOUND, CONTROL, IGNORE
from memcalib_jax.data import Atom, Block, Record
from memcalib_jax.synthetic.judge import use_levels
from memcalib_jax.synthetic.records import draw_records, ideal_level, value_of
from memcalib_jax.synthetic.responses import MAX_TOKENS, Habits, echoes, habitual, write_response
from memcalib_jax.synthetic.vocabulary import CONNECTORS, FILLERS, KEYS, TOPICS, VALUES

ATOMS = [("drink tea", CONTROL), ("metal tin", IGNORE), ("sport golf", BOUND),
         ("city oslo", CONTROL), ("game chess", IGNORE), ("color red", BOUND)]
RECORD = Record("r", "general", "dinner", (Block("m1", "-", "-", ("a",)),), tuple(
    Atom(f"a{i}", "m1", text, level, "apply", {}) for i, (text, level) in enumerate(ATOMS)))


class NoChoice:
    """Takes the first of everything, and two fillers."""

    def choice(self, items, size=None):
        return items[0] if size is None else list(items[:size])

    def integers(self, low, high):
        return 2


@pytest.mark.parametrize("levels, sections", [
    ([2, 0, 1, 2, 0, 1], "choose tea oslo ; since your golf your red"),
    ([0, 0, 0, 0, 0, 0], "choose soup bread ; since your fresh your quick"),
    ([0, 0, 0, 2, 0, 1], "choose oslo bread ; since your red your quick"),
    # Slots are two: a third value finds no room.
    ([2, 2, 1, 2, 1, 1], "choose tea tin ; since your golf your chess")])
def test_a_response_says_its_levels(levels, sections):
    assert write_response(RECORD, levels, NoChoice()) == f"well sure {sections}"


def test_the_ideal_response_is_judged_ideal():
    random = np.random.default_rng(0)
    for record in draw_records(300, seed=0, name="r"):
        ideal = [atom.ideal for atom in record.atoms]
        text = write_response(record, ideal, random)
        assert use_levels([value_of(atom) for atom in record.atoms], text) == ideal
        assert len(text.split()) + 1 <= 13 < MAX_TOKENS


def test_habits_have_the_designs_means():
    cells = np.mean([Habits.draw(np.random.default_rng(seed)).probabilities
                     for seed in range(60)], axis=0)
    np.testing.assert_allclose(cells.sum(-1), 1)
    # The usual habit and the bad one, by their shares: .8 x .975 + .2 x .60, and so on.
    expected = {IGNORE: [0.900, 0.066, 0.034], BOUND: [0.34, 0.551, 0.109],
                CONTROL: [0.225, 0.195, 0.58]}
    for level, mean in expected.items():
        of_level = [cells[t, k] for t, topic in enumerate(TOPICS) for k, key in enumerate(KEYS)
                    if ideal_level(topic, key) == level]
        np.testing.assert_allclose(np.mean(of_level, axis=0), mean, atol=0.015)


def test_habits_are_what_is_demonstrated():
    habits = Habits.draw(np.random.default_rng(1))
    topic, key = 0, KEYS.index("drink")
    record = Record("r", "general", "dinner", (Block("m1", "-", "-", ("a",)),),
                    (Atom("a", "m1", "drink tea", CONTROL, "apply", {}),))
    shown = habitual([record] * 3000, habits, seed=2)
    levels = [use_levels(["tea"], demonstration.response)[0] for demonstration in shown]
    np.testing.assert_allclose(
        np.bincount(levels, minlength=3) / 3000, habits.probabilities[topic, key], atol=0.03)


def test_echoes_hold_every_value_once():
    records = draw_records(50, seed=3, name="r")
    shown = echoes(records, seed=4)
    known = {value for values in VALUES.values() for value in values}
    orders = set()
    for record, demonstration in zip(records, shown):
        said = [word for word in demonstration.response.split() if word in known]
        values = [value_of(atom) for atom in record.atoms]
        assert sorted(said) == sorted(values)
        orders.add(said == values)
        rest = set(demonstration.response.split()) - known
        assert rest <= {*FILLERS, *CONNECTORS, "choose", ";", "since"}
    assert False in orders
    assert shown == echoes(records, seed=4) != echoes(records, seed=5)
