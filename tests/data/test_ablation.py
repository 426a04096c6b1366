import dataclasses
import itertools

import pytest

from memcalib_jax.data import ablate, build_messages, load_records, sample_path


def _memories(messages):
    content = messages[1]["content"]
    assert content.startswith("Memories:\n") and content.endswith("\n\nQuestion:\n" + QUESTION)
    return content.removeprefix("Memories:\n").removesuffix("\n\nQuestion:\n" + QUESTION)


QUESTION = "What should I cook?"


@pytest.mark.parametrize(
    "atom_ids, representation, expected",
    [
        (
            ["a1"],
            "atomic",
            "[1] The user has a gas stove.\n[2] The user visited Oslo.\n[3] A cat. A dog. A drum.",
        ),
        (
            ["a2", "a5"],
            "fluent",
            "[1] The user is vegan.\n[2] Once went to Oslo.\n[3] A cat. A drum.",
        ),
        (
            ["a3"],
            "fluent",
            "[1] A vegan with a gas stove.\n[3] Has a cat, a dog and a drum.",
        ),
        (["a3", "a2", "a1"], "atomic", "[3] A cat. A dog. A drum."),
        (["a1", "a2", "a3", "a4", "a5", "a6"], "atomic", "(none)"),
        (["a1", "a2", "a3", "a4", "a5", "a6"], "fluent", "(none)"),
    ],
)
def test_removes_atoms_and_keeps_numbers(record, atom_ids, representation, expected):
    assert _memories(ablate(record, atom_ids, representation=representation)) == expected


@pytest.mark.parametrize("representation", ["atomic", "fluent"])
def test_removing_nothing_changes_nothing(representation):
    for record in load_records(sample_path("records.jsonl")):
        whole = build_messages(record, representation=representation)
        assert ablate(record, [], representation=representation) == whole


@pytest.mark.parametrize("representation", ["atomic", "fluent"])
def test_the_order_and_repetition_of_ids_do_not_matter(record, representation):
    expected = ablate(record, ["a1", "a3", "a5"], representation=representation)
    for ids in itertools.permutations(["a1", "a3", "a5"]):
        assert ablate(record, ids, representation=representation) == expected
        assert ablate(record, [*ids, "a3"], representation=representation) == expected


def _without(record, removed):
    """Removes atoms from the record itself, by its own route; no block may be emptied."""
    texts = {atom.id: atom.text.strip() for atom in record.atoms}
    blocks = []
    for block in record.blocks:
        kept = tuple(atom_id for atom_id in block.atom_ids if atom_id not in removed)
        assert kept
        text = " ".join(texts[atom_id] for atom_id in kept)
        blocks.append(dataclasses.replace(block, atomic_text=text, atom_ids=kept))
    atoms = tuple(atom for atom in record.atoms if atom.id not in removed)
    return dataclasses.replace(record, blocks=tuple(blocks), atoms=atoms)


def test_removing_in_two_steps_equals_removing_at_once():
    for record in load_records(sample_path("records.jsonl")):
        first = {block.atom_ids[0] for block in record.blocks if len(block.atom_ids) > 1}
        second = {record.blocks[-1].atom_ids[-1]}
        in_steps = ablate(_without(record, first), second - first)
        assert in_steps == ablate(record, first | second)
        assert in_steps != build_messages(record)


def test_removing_a_whole_block_drops_its_line_alone():
    for record in load_records(sample_path("records.jsonl")):
        lines = build_messages(record)[1]["content"].split("\n")
        for number, block in enumerate(record.blocks, start=1):
            expected = [line for line in lines if not line.startswith(f"[{number}] ")]
            assert len(expected) == len(lines) - 1
            assert ablate(record, block.atom_ids)[1]["content"].split("\n") == expected


def test_refuses_unknown_ids(record):
    with pytest.raises(ValueError, match="record 'r1' has no atom 'a7', 'b1'"):
        ablate(record, ["b1", "a1", "a7"])
    with pytest.raises(ValueError, match="not 'prose'"):
        ablate(record, [], representation="prose")
