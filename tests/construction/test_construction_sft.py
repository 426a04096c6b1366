import asyncio

import pytest

from memcalib_jax.construction.decisions import Rejected
from memcalib_jax.construction.sft import case, guidance, respond
from memcalib_jax.data import load_records, sample_path

RECORD = load_records(sample_path("records.jsonl"))[0]


def run(generator, verifiers, max_rounds=3):
    return asyncio.run(respond({"id": RECORD.id}, record_of=lambda id: RECORD,
                               generator=generator, verifiers=verifiers, max_rounds=max_rounds))


def off_level(reply):
    first, *rest = reply["atoms"]
    return reply | {"atoms": [first | {"level": "C" if first["level"] != "C" else "A"}, *rest]}


class Rounds:
    """Answers by round: a fault in the first, none from the second on."""

    def __init__(self, *changes):
        self.changes = list(changes)

    def __call__(self, reply):
        return (self.changes.pop(0) if self.changes else lambda reply: reply)(reply)


def test_two_approvals_accept(asker):
    made = run(asker(), [asker(), asker()])
    assert (made["round"], made["rejected"]) == (1, [])
    for atom in RECORD.atoms:
        assert (atom.text in made["response"]) == (atom.ideal > 0)


@pytest.mark.parametrize("change, fault", [
    (off_level, "is at C, not A"),
    (lambda reply: reply | {"quality": False, "reason": "wrong dose"}, "quality: wrong dose"),
    (lambda reply: reply | {"safe": False}, "safe: no reason given"),
])
def test_one_rejection_asks_for_another_response(asker, change, fault):
    generator = asker()
    made = run(generator, [asker(), asker(verify=Rounds(change))])
    assert made["round"] == 2 and len(generator.client.asked) == 2
    [[found]] = made["rejected"]
    assert found.startswith("verifier 2: ") and (fault in found or change is off_level)


def test_rounds_are_bounded(asker):
    generator = asker()
    always = asker(verify=lambda reply: reply | {"safe": False, "reason": "harm"})
    with pytest.raises(Rejected, match="not_approved: 3 responses; the last: verifier 1: safe: "
                                       "harm"):
        run(generator, [always, asker()])
    assert len(generator.client.asked) == 3


@pytest.mark.parametrize("reason, task, reply", [
    ("malformed_reply", "respond", {"response": " "}),
    ("malformed_reply", "respond", "No."),
    ("missing_atom", "verify", lambda reply: reply | {"atoms": reply["atoms"][1:]}),
    ("duplicate_atom", "verify",
     lambda reply: reply | {"atoms": [reply["atoms"][0], *reply["atoms"]]}),
    ("unknown_atom", "verify", lambda reply: reply | {"atoms": [{"id": "x", "level": "A"}]}),
    ("unknown_level", "verify",
     lambda reply: reply | {"atoms": [reply["atoms"][0] | {"level": "D"}]}),
    ("malformed_reply", "verify", lambda reply: reply | {"safe": "yes"}),
])
def test_bad_replies(asker, reason, task, reply):
    with pytest.raises(Rejected) as caught:
        run(asker(**{task: reply}), [asker(**{task: reply}), asker()])
    assert caught.value.reason == reason


def test_a_verifier_sees_the_response_and_the_generator_the_guidance():
    assert [item["level"] for item in guidance(RECORD)["guidance"]] == [
        "ABC"[atom.ideal] for atom in RECORD.atoms]
    assert case(RECORD, "hello")["response"] == "hello"
    assert [item["id"] for item in case(RECORD, "")["atoms"]] == [
        atom.id for atom in RECORD.atoms]
