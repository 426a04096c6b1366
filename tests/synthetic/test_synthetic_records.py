import json

import numpy as np
import pytest

from memcalib_jax.credit import BOUND, CONTROL, IGNORE
from memcalib_jax.data import ablate, build_messages, load_records, render
from memcalib_jax.synthetic.records import draw_records, ideal_level, key_of, value_of
from memcalib_jax.synthetic.vocabulary import DEFAULTS, END, KEYS, TOPICS, VALUES, words


@pytest.mark.parametrize("topic, key, level", [
    # The topic's number times three is its first controlling key; keys are counted in a circle.
    ("dinner", "drink", CONTROL), ("dinner", "city", CONTROL), ("dinner", "sport", BOUND),
    ("dinner", "fruit", BOUND), ("dinner", "metal", IGNORE), ("dinner", "job", IGNORE),
    ("garden", "gem", CONTROL), ("garden", "job", CONTROL), ("garden", "drink", BOUND),
    ("garden", "city", BOUND), ("garden", "sport", IGNORE), ("garden", "bird", IGNORE)])
def test_the_hidden_rule(topic, key, level):
    assert ideal_level(topic, key) == level


def test_every_word_has_one_meaning():
    assert len(words()) == len(set(words())) == 147
    assert len(KEYS) == 18 and len(TOPICS) == len(DEFAULTS) == 6
    assert {len(values) for values in VALUES.values()} == {4}


def test_drawn_records_follow_the_design():
    records = draw_records(2000, seed=1, name="r")
    assert [record.id for record in records[:2]] == ["r-0", "r-1"]
    levels = [[atom.ideal for atom in record.atoms] for record in records]
    assert {len(row) for row in levels} == {8, 9, 10, 11}
    for level in (BOUND, CONTROL):
        counts = np.bincount([row.count(level) for row in levels], minlength=3) / len(levels)
        np.testing.assert_allclose(counts, [0.15, 0.55, 0.30], atol=0.035)
    assert 0.74 < np.mean([level == IGNORE for row in levels for level in row]) < 0.78
    for record in records:
        assert len(record.blocks) in (3, 4)
        keys = [key_of(atom) for atom in record.atoms]
        assert len(set(keys)) == len(keys)
        assert all(value_of(atom) in VALUES[key_of(atom)] for atom in record.atoms)
        assert [atom.ideal for atom in record.atoms] == [
            ideal_level(record.question, key) for key in keys]
    assert draw_records(3, seed=1, name="r") == records[:3]
    assert draw_records(3, seed=2, name="r") != records[:3]


def test_records_are_what_the_loader_reads(tmp_path):
    records = draw_records(20, seed=0, name="r")
    lines = [json.dumps({
        "id": record.id, "domain": record.domain, "question": record.question,
        "memory_blocks": [
            {"parent_memory_id": block.id, "memory_text": block.fluent_text,
             "atomic_concat_text": block.atomic_text, "atom_ids": block.atom_ids}
            for block in record.blocks],
        "memories": [
            {"atom_id": atom.id, "parent_memory_id": atom.block_id, "text": atom.text,
             "u_star": "ABC"[atom.ideal], "memory_action": atom.action,
             "usage_rubric": atom.rubric} for atom in record.atoms]}) for record in records]
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(lines))
    assert load_records(path) == records


def test_prompts_are_the_librarys_own_one_token_a_word(tokenizer):
    record = draw_records(1, seed=0, name="r")[0]
    prompt = render(tokenizer, build_messages(record))
    system, user = build_messages(record)
    assert tokenizer.decode(prompt[0]) == system["content"]
    assert tokenizer.decode(prompt[1:-1]).split() == user["content"].split()
    assert tokenizer.decode(prompt[-1]) == "<answer>"
    assert tokenizer.unk_token_id not in prompt and len(prompt) < 40
    without = render(tokenizer, ablate(record, [record.atoms[0].id]))
    first = prompt.index(tokenizer.convert_tokens_to_ids(key_of(record.atoms[0])))
    assert without == prompt[:first] + prompt[first + 2:]
    assert tokenizer.eos_token_id == words().index(END)
