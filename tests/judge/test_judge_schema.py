import copy
import json

import pytest

from memcalib_jax.judge import AtomJudgment, parse_judgment


def reply():
    return {
        "atom_judgments": [
            judged("a1", "C", "B"),
            judged("a2", "A", "A"),
            judged("a3", "B", "C"),
        ]
    }


def judged(atom_id, ideal, level):
    return {
        "atom_id": atom_id,
        "u_star": ideal,
        "predicted_usage_level": level,
        "evidence_quote": f"quote {atom_id}",
        "reason": f"reason {atom_id}",
    }


def test_levels_follow_the_record_not_the_reply(record):
    value = reply()
    value["atom_judgments"].reverse()
    judgment = parse_judgment(json.dumps(value), record.atoms)
    assert judgment.levels == (1, 0, 2)
    assert (judgment.valid, judgment.reason) == (True, None)
    assert judgment.details[2] == AtomJudgment("a3", 2, "quote a3", "reason a3")


@pytest.mark.parametrize(
    "wrap",
    [
        "{}",
        "\n {} \n",
        "```json\n{}\n```",
        "```\n{}```",
        "First {{thoughts}}.\n```json\n{}\n```\nThen more.",
        "<think>hm</think>Here it is: {} Done.",
    ],
)
def test_wrappings(record, wrap):
    text = wrap.replace("{{thoughts}}", "<thoughts>{x}").replace("{}", json.dumps(reply()))
    assert parse_judgment(text, record.atoms).levels == (1, 0, 2)


def edited(change):
    value = copy.deepcopy(reply())
    change(value["atom_judgments"])
    return json.dumps(value)


def set_field(place, field, content):
    return lambda items: items[place].__setitem__(field, content)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda items: items.pop(1), "no judgment of 'a2'"),
        (lambda items: items.clear(), "no judgment of 'a1', 'a2', 'a3'"),
        (lambda items: items.append(judged("a1", "C", "A")), "atom 'a1' is judged twice"),
        (lambda items: items.append(judged("a9", "C", "A")), "unknown atom 'a9'"),
        (lambda items: items.append("a1"), r"atom_judgments\[3\] is no object"),
        (lambda items: items[0].pop("atom_id"), r"atom_judgments\[0\]: atom_id is missing"),
        (set_field(0, "atom_id", 1), r"atom_judgments\[0\]: atom_id is missing or no string"),
        (set_field(0, "u_star", "A"), "atom 'a1': u_star is 'A', not 'C'"),
        (set_field(0, "u_star", 2), "atom 'a1': u_star is missing or no string"),
        (set_field(1, "predicted_usage_level", "D"), "atom 'a2': predicted_usage_level is 'D'"),
        (set_field(1, "predicted_usage_level", "AB"), "predicted_usage_level is 'AB'"),
        (set_field(1, "predicted_usage_level", ""), "predicted_usage_level is ''"),
        (set_field(1, "predicted_usage_level", "a"), "predicted_usage_level is 'a'"),
        (set_field(1, "predicted_usage_level", None), "predicted_usage_level is missing"),
        (set_field(2, "evidence_quote", None), "atom 'a3': evidence_quote is missing"),
        (lambda items: items[2].pop("reason"), "atom 'a3': reason is missing"),
        (set_field(2, "reason", ["x"]), "atom 'a3': reason is missing or no string"),
    ],
)
def test_faults_are_named(record, change, said):
    with pytest.raises(ValueError, match=said):
        parse_judgment(edited(change), record.atoms)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "no JSON object"),
        ("I cannot judge this.", "no JSON object"),
        ("} {", "no JSON object"),
        ('{"atom_judgments": [', "no JSON object"),
        ("[" * 100_000 + "{}", "atom_judgments is missing"),
        ('{"a":' * 100_000 + "}" * 100_000, "no JSON object"),
        ("[]", "no JSON object"),
        ("{}", "atom_judgments is missing or no list"),
        ('{"atom_judgments": {}}', "atom_judgments is missing or no list"),
        (json.dumps(reply()) * 2, "no JSON object"),
    ],
)
def test_no_judgment(record, text, said):
    with pytest.raises(ValueError, match=said):
        parse_judgment(text, record.atoms)


@pytest.mark.parametrize("u_star", ["A", "?", None])
def test_a_blind_judge_need_not_name_the_target(record, u_star):
    value = reply()
    for item in value["atom_judgments"]:
        item["u_star"] = u_star
    assert parse_judgment(json.dumps(value), record.atoms, blind=True).levels == (1, 0, 2)
    del value["atom_judgments"][0]["reason"]
    with pytest.raises(ValueError, match="atom 'a1': reason is missing"):
        parse_judgment(json.dumps(value), record.atoms, blind=True)
