import random

import numpy as np
import pytest

from memcalib_jax.data import load_records, load_responses, sample_path
from memcalib_jax.evaluation.agreement import cohen_kappa, confusion
from memcalib_jax.judge.lexical import lexical_footprints, lexical_levels

# The rule's constants and word lists were chosen on the other half of the sample's records.
HELD_OUT = {
    "coding": (1, 3, 4, 6, 7, 10, 11, 16),
    "general": (2, 7, 8, 9, 10, 11, 13, 15),
    "health": (1, 2, 4, 7, 9, 10, 13, 16),
}
QUERY = "What could I cook on Friday?"
ATOMS = [
    "The user has a diagnosed peanut allergy.",
    "The user's nephew plays the trombone.",
    "The user's sister plays the violin.",
]
EARLY = "Your peanut allergy rules out satay."
OTHER = "Rice is cheap. Beans are filling. Soup keeps well. Bread is easy."


def levels(response, *, query=QUERY, memory=("",), atoms=tuple(ATOMS)):
    return lexical_levels(query, memory, atoms, response)


@pytest.mark.parametrize(
    "response, expected",
    [
        (f"{EARLY} {OTHER}", [2, 0, 0]),
        (f"{OTHER} {EARLY}", [1, 0, 0]),  # the last of five sentences
        (f"{OTHER} {OTHER} {OTHER} {EARLY} {EARLY} {EARLY}", [2, 0, 0]),  # three, though late
        (OTHER, [0, 0, 0]),
        # "plays" is of two atoms, and so 0.5 of the 2.5 that either weighs.
        ("Somebody plays. " + OTHER, [0, 0, 0]),
        ("A nephew! " + OTHER, [0, 2, 0]),  # 1 of 2.5
        ("My sister’s violins.", [0, 0, 2]),
        ("Peanuts.", [0, 0, 0]),  # one word of three is not more than a third
        ("Peanuts. Ask about allergies, too.", [2, 0, 0]),  # but two, in neighbours, are
        ("Peanuts. Rice. Ask about allergies, too.", [0, 0, 0]),
    ],
)
def test_rule(response, expected):
    assert levels(response) == expected


def test_query_words_are_no_evidence():
    assert levels(EARLY, query="What can I eat with a diagnosed peanut allergy?") == [0, 0, 0]


def test_words_of_many_memories_weigh_less():
    # By the atoms, "nephew" is 1 of 1 + 1 + 0.5; in four memory texts, 0.25 of 0.25 + 1 + 0.5.
    assert levels("A nephew comes. " + OTHER)[1] == 2
    assert levels("A nephew comes. " + OTHER, memory=["nephew"] * 4)[1] == 0


def test_evidence_is_the_best_sentence():
    response = f"Nuts? No peanut here. {EARLY}\n- {OTHER}"
    first, second, _ = lexical_footprints(QUERY, [], ATOMS, response)
    assert (first.level, first.sentence) == (2, EARLY)
    assert (second.level, second.sentence) == (0, "")


def test_repeating_a_use_never_lowers_it():
    # A judge that lowered a level at repetition would reward the wrong copy.
    for response in (f"{EARLY} {OTHER}", f"{OTHER} {EARLY}"):
        once = levels(response)[0]
        assert levels(f"{response} {EARLY}")[0] >= once
        assert levels(f"{response} {OTHER} {EARLY} {OTHER}")[0] >= once


def test_order_of_atoms_does_not_matter():
    response = f"{EARLY} My nephew, a trombone, why not. {OTHER}"
    shuffled = [2, 0, 1]
    expected = [levels(response)[i] for i in shuffled]
    assert levels(response, atoms=[ATOMS[i] for i in shuffled]) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\x00\ud800\u2028",
        "!?!...;;;:::",
        "'''''’’’",
        "ing ed s ''s 's",
        "昨日、花生过敏。",
        "ألفول السوداني",
        "aaaa" * 20_000,
        "peanut allergy. " * 20_000,
        "no end " * 30_000,
    ],
)
def test_any_text_gets_levels(text):
    for found in (levels(text), levels(EARLY, atoms=[text] * 3), levels(EARLY, query=text)):
        assert len(found) == 3 and set(found) <= {0, 1, 2}


def test_gibberish_uses_nothing():
    rng = random.Random(5)
    letters = "abcdefghijklmnopqrstuvwxyz .\n"
    for _ in range(50):
        assert levels("".join(rng.choices(letters, k=400))) == [0, 0, 0]


def test_no_atoms():
    assert lexical_levels(QUERY, [], [], EARLY) == []


def test_agrees_with_careful_readers_on_records_it_was_not_fitted_to():
    held_out = {f"smp-{name}-{i:03d}" for name, numbers in HELD_OUT.items() for i in numbers}
    records = {record.id: record for record in load_records(sample_path("records.jsonl"))}
    read, found = [], []
    for item in load_responses(sample_path("responses.jsonl")):
        if item.record_id in held_out:
            record = records[item.record_id]
            blocks = [block.fluent_text for block in record.blocks]
            texts = [atom.text for atom in record.atoms]
            found += lexical_levels(record.question, blocks, texts, item.text)
            read += [item.levels[atom.id] for atom in record.atoms]
    read, found = np.array(read), np.array(found)
    assert len(read) == 720
    assert np.mean((read > 0) == (found > 0)) >= 0.93
    assert cohen_kappa(confusion(read, found, 3)) >= 0.62
