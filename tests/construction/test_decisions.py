"""Malformed rows and replies, each with the stage's decision and reason."""

import asyncio
import json

import pytest

from memcalib_jax.api import ChatError
from memcalib_jax.construction import sample_paths
from memcalib_jax.construction.decisions import Rejected
from memcalib_jax.construction.layout import LayoutLimits
from memcalib_jax.construction.pipeline import STAGES, construction_steps
from memcalib_jax.construction.screening import admit
from memcalib_jax.construction.sources import SourceFile, read_rows

WORDS = ("My bakery on Alder Street opens at five and I knead the dough by hand because the mixer "
         "broke in March while my cousin Rosalind was visiting from the coast for eleven days.")
ANSWER = ("Knead for eight minutes, rest the dough for half an hour, and ask Rosalind whether the "
          "mixer can be repaired before the next market day.")


def row(**changes):
    value = {"id": "r1", "source": "test", "domain": "general", "context": WORDS,
             "question": "How do I plan the next week?", "reference_answer": ANSWER} | changes
    return {key: text for key, text in value.items() if text is not None}


def refused(tmp_path, *lines):
    """Returns the last row's reason, or None where it is admitted."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
        for line in lines))
    *_, (_, rejected) = admit(read_rows(SourceFile(str(path))))
    return rejected and rejected.reason


def test_a_good_row_is_admitted(tmp_path):
    assert refused(tmp_path, row()) is None
    assert refused(tmp_path, row(context=None, question=WORDS)) is None
    assert refused(tmp_path, row(id=7)) is None


OTHER = WORDS.replace("bakery", "pottery").replace("dough", "clay")
ROWS = [
    ("malformed_row", b"not json"),
    ("malformed_row", b"[1, 2]"),
    ("malformed_row", b'"text"'),
    ("malformed_row", b'{"id": "r1", "question": '),
    ("malformed_row", b"\xff\xfe{}"),
    ("malformed_row", b"[" * 100_000),
    ("malformed_row", b'{"id": "r1", "source": "t", "domain": "general", "question": "\\ud800"}'),
    ("malformed_row", row(question=["How?"])),
    ("malformed_row", row(context={"text": WORDS})),
    ("malformed_row", row(reference_answer=3)),
    ("missing_id", row(id=None)),
    ("missing_id", row(id="  ")),
    ("missing_source", row(source=None)),
    ("unknown_domain", row(domain=None)),
    ("unknown_domain", row(domain="cooking")),
    ("empty_question", row(question="")),
    ("empty_question", row(question=None)),
    ("empty_answer", row(reference_answer="\n")),
    ("too_short", row(context="", question="Why is it so slow?")),
    ("too_short", row(reference_answer="Buy a new one.")),
    ("absurd_length", row(context=WORDS * 60)),
    ("absurd_length", row(reference_answer=ANSWER * 80)),
    ("noisy_markup", row(context=f"<div><p>{WORDS}</p><br/>&nbsp;</div>[quote=x]{{{{sig}}}}")),
    ("unreadable_text", row(context=WORDS + "\ufffd" * 9)),
    ("non_english", row(context="Meine Bäckerei öffnet um fünf Uhr, und ich knete den Teig von "
                                "Hand, weil die Maschine im März kaputtgegangen ist.")),
    ("non_english", row(reference_answer="Pétrissez la pâte pendant huit minutes, laissez-la "
                                         "reposer une demi-heure et demandez conseil à Rosalind.")),
]


@pytest.mark.parametrize("reason, line", ROWS)
def test_a_bad_row_is_refused_by_name(tmp_path, reason, line):
    assert refused(tmp_path, line) == reason


@pytest.mark.parametrize("reason, second", [
    ("duplicate_id", row(context=OTHER, reference_answer=OTHER)),
    ("exact_duplicate", row(id="r2")),
    ("exact_duplicate", row(id="r2", context=WORDS.upper() + "!")),
    ("near_duplicate", row(id="r2", context=WORDS.replace("eleven", "ten"))),
    (None, row(id="r2", context=OTHER, reference_answer=OTHER, question="What about glazes?")),
])
def test_the_first_of_twins_stays(tmp_path, reason, second):
    assert refused(tmp_path, row(), second) == reason


@pytest.mark.parametrize("text", [
    "std::vector<int> v; for (auto& x : v) { x += 1; } // <T> &x &y",
    "I render `<div><p><br/></p></div>` and ```<table><tr><td></td></tr></table>``` in my test.",
])
def test_code_is_no_noise(tmp_path, text):
    assert refused(tmp_path, row(domain="coding", context=f"{WORDS} {text}")) is None


def good_sample():
    path, _ = sample_paths()
    with open(path) as file:
        return json.loads(file.readline())


def decide(asker, **replies):
    """Takes a good sample through all stages; returns the stage and reason where it ends."""
    sample = good_sample()
    generator, reviewers = asker(**replies), [asker(**replies), asker()]
    steps = construction_steps(generator, reviewers, LayoutLimits())
    for name in STAGES:
        try:
            sample |= asyncio.run(steps[name](sample))
        except Rejected as rejected:
            return name, rejected.reason
    return None


def test_a_good_sample_passes(asker):
    assert decide(asker) is None


def without(key):
    return lambda reply: {name: value for name, value in reply.items() if name != key}


def first(key, **changes):
    """Changes the first item of a list of a reply; None takes a field out of it."""
    def change(reply):
        item = {name: value for name, value in (reply[key][0] | changes).items()
                if value is not None}
        return reply | {key: [item, *reply[key][1:]]}
    return change


def review(name, **changes):
    return lambda reply: {"checks": reply["checks"] | {name: changes}}


REFUSAL = "I'm sorry, but I can't help with that."
REPLIES = [
    ("screening", "malformed_reply", "screen", REFUSAL),
    ("screening", "malformed_reply", "screen", {"coherent": "yes", "extractable": True,
                                                "reason": "x"}),
    ("screening", "malformed_reply", "screen", '{"coherent": true, "extractable": tr'),
    ("screening", "incoherent_pair", "screen", {"coherent": False, "extractable": True,
                                                "reason": "other question"}),
    ("screening", "no_extractable_context", "screen", {"coherent": True, "extractable": False,
                                                       "reason": "nothing told"}),
    ("derivation", "malformed_reply", "derive", "[]"),
    ("derivation", "malformed_reply", "derive", without("query")),
    ("derivation", "malformed_reply", "derive", without("passages")),
    ("derivation", "malformed_reply", "derive", lambda reply: reply | {"passages": "none"}),
    ("derivation", "malformed_reply", "derive", first("passages", text="")),
    ("derivation", "malformed_reply", "derive", first("passages", quotes=None)),
    ("derivation", "malformed_reply", "derive", lambda reply: reply | {"query": "\ud800"}),
    ("derivation", "no_memory", "derive", lambda reply: reply | {"passages": []}),
    ("derivation", "unfaithful_quote", "derive", first("passages", quotes=["I own a yacht."])),
    ("derivation", "unfaithful_quote", "derive", first("passages", quotes=[7])),
    ("derivation", "query_leaks", "derive",
     lambda reply: reply | {"query": f"{reply['passages'][0]['text']} What now?"}),
    ("annotation", "malformed_reply", "annotate", {"atoms": []}),
    ("annotation", "malformed_reply", "annotate", {"atoms": ["The user bakes."]}),
    ("annotation", "malformed_reply", "annotate", first("atoms", text=None)),
    ("annotation", "unknown_passage", "annotate", first("atoms", passage=99)),
    ("annotation", "unknown_passage", "annotate", first("atoms", passage="1")),
    ("annotation", "unknown_level", "annotate", first("atoms", level="D")),
    ("annotation", "unknown_action", "annotate", first("atoms", level="A", action="apply")),
    ("annotation", "unknown_action", "annotate", first("atoms", level="C", action="ignore")),
    ("annotation", "order_changed", "annotate", lambda reply: {"atoms": reply["atoms"][::-1]}),
    ("annotation", "passage_without_atom", "annotate",
     lambda reply: {"atoms": [atom for atom in reply["atoms"] if atom["passage"] != 2]}),
    ("annotation", "duplicate_atom", "annotate",
     lambda reply: {"atoms": [reply["atoms"][0], *reply["atoms"]]}),
    ("annotation", "no_used_atom", "annotate",
     lambda reply: {"atoms": [atom | {"level": "A", "action": "ignore"}
                              for atom in reply["atoms"]]}),
    ("distractors", "malformed_reply", "distract", without("hard")),
    ("distractors", "wrong_number", "distract", lambda reply: reply | {"others": []}),
    ("distractors", "wrong_number", "distract", without("others")),
    ("distractors", "malformed_reply", "distract",
     lambda reply: reply | {"others": [*reply["others"][1:], ""]}),
    ("distractors", "duplicate_atom", "distract",
     lambda reply: reply | {"hard": reply["others"][0]}),
    ("distractors", "malformed_reply", "rubric", {"rubrics": {}}),
    ("distractors", "missing_rubric", "rubric", lambda reply: {"rubrics": reply["rubrics"][1:]}),
    ("distractors", "unknown_atom", "rubric", first("rubrics", number=99)),
    ("distractors", "duplicate_atom", "rubric", first("rubrics", number=2)),
    ("distractors", "incomplete_rubric", "rubric", first("rubrics", over_use=None)),
    ("distractors", "incomplete_rubric", "rubric", first("rubrics", observable_checks=[])),
    ("distractors", "incomplete_rubric", "rubric", first("rubrics", observable_checks=[3])),
    ("composition", "malformed_reply", "naturalize", "Here are your blocks."),
    ("composition", "missing_block", "naturalize",
     lambda reply: {"blocks": reply["blocks"][1:]}),
    ("composition", "unknown_block", "naturalize", first("blocks", id="m77")),
    ("composition", "duplicate_block", "naturalize", first("blocks", id="m2")),
    ("composition", "wrong_length", "naturalize", first("blocks", text="The user.")),
    ("composition", "wrong_length", "naturalize", first("blocks", text="so on and on " * 200)),
    ("composition", "not_naturalized", "naturalize",
     lambda reply: first("blocks", text="- " + reply["blocks"][0]["text"])(reply)),
    ("assurance", "malformed_reply", "review", {"checks": []}),
    ("assurance", "malformed_reply", "review", {"approve": True}),
    ("assurance", "malformed_reply", "review", review("levels", **{"pass": "no"})),
    ("assurance", "malformed_reply", "review", review("levels", **{"pass": False})),
    ("assurance", "incomplete_review", "review",
     lambda reply: {"checks": without("rubrics")(reply["checks"])}),
    ("assurance", "review_faithful", "review",
     review("faithful", **{"pass": False, "reason": "a date was made up"})),
    ("assurance", "review_no_leak", "review",
     review("no_leak", **{"pass": False, "reason": "names the race"})),
]


@pytest.mark.parametrize("stage, reason, task, reply", REPLIES)
def test_a_bad_reply_ends_a_sample_by_name(asker, stage, reason, task, reply):
    assert decide(asker, **{task: reply}) == (stage, reason)


def test_there_are_sixty_malformed_rows_and_replies():
    assert len(ROWS) + len(REPLIES) >= 60


def test_a_bad_reply_is_asked_again(asker):
    assert decide(asker, derive=[REFUSAL, "{}", lambda reply: reply]) is None


@pytest.mark.parametrize("reason, change", [
    ("malformed_reply", without("task_kind")),
    ("unknown_task_kind", lambda reply: reply | {"task_kind": "poetry"}),
    ("code_in_query", lambda reply: reply | {"query": "Why?\n```\nprint(1)\n```"}),
])
def test_coding_queries_are_tasks_in_prose(asker, reason, change):
    path, _ = sample_paths()
    with open(path) as file:
        sample = next(row for row in map(json.loads, file) if row["domain"] == "coding")
    steps = construction_steps(asker(derive=change), [])
    with pytest.raises(Rejected) as caught:
        asyncio.run(steps["derivation"](sample))
    assert caught.value.reason == reason
    asked = asker()
    derived = asyncio.run(construction_steps(asked, [])["derivation"](sample))
    assert derived["task_kind"] in ("planning", "debugging")


def test_more_atoms_than_a_layout_holds(asker):
    sample = good_sample()
    steps = construction_steps(asker(), [], LayoutLimits(1, 1, 1, 3))
    for name in STAGES[:3]:
        sample |= asyncio.run(steps[name](sample))
    with pytest.raises(Rejected, match="too_many_atoms"):
        asyncio.run(steps["distractors"](sample))


def test_an_endpoint_that_fails_is_no_rejection(asker):
    async def fail(*_, **__):
        raise ChatError("timeout", "no answer within 300 s")

    broken = asker()
    broken.client.complete = fail
    with pytest.raises(ChatError, match="no answer"):
        asyncio.run(construction_steps(broken, [])["screening"](good_sample()))
