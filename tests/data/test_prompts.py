import jinja2
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from memcalib_jax.data import build_messages, load_records, render, sample_path
from memcalib_jax.data.prompts import SYSTEM_PROMPT

PLAIN = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = PLAIN.replace(
    "<assistant>",
    "<assistant>{% if enable_thinking is defined and enable_thinking is false %} <nothink>"
    "{% endif %}",
)
WITH_BOS = "<s> " + PLAIN
TWO_BOS = "<s> <s> " + PLAIN
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + PLAIN
)
DROPS_SYSTEM = PLAIN.replace("in messages", "in messages if m.role != 'system'")
REFUSES_ALL = "{{ raise_exception('not today') }}"

SPECIAL = ["[UNK]", "<s>", "</s>", "<system>", "<user>", "<assistant>", "<nothink>"]
UNK, BOS, END, SYSTEM, USER, ASSISTANT, NO_THINK = range(7)
BE, BRIEF, HI = 7, 8, 9
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def _tokenizer(template, **kwargs):
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, "be", "brief", "hi"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        additional_special_tokens=["<system>", "<user>", "<assistant>", "<nothink>"],
        **{"bos_token": "<s>", "eos_token": "</s>", **kwargs},
    )
    fast.chat_template = template
    return fast


FULL = [SYSTEM, BE, BRIEF, END, USER, HI, END, ASSISTANT]
FOLDED = [USER, BE, BRIEF, HI, END, ASSISTANT]


@pytest.mark.parametrize(
    "template, expected",
    [
        (PLAIN, FULL),
        (THINKING, [*FULL, NO_THINK]),
        (WITH_BOS, [BOS, *FULL]),
        (TWO_BOS, [BOS, *FULL]),
        (NO_SYSTEM, FOLDED),
        (DROPS_SYSTEM, FOLDED),
        ({"default": PLAIN, "tool_use": REFUSES_ALL}, FULL),
    ],
)
def test_renders_through_the_template(template, expected):
    ids = render(_tokenizer(template), MESSAGES)
    assert ids == expected
    assert type(ids) is list and {type(token) for token in ids} == {int}


def test_renders_without_a_system_message_or_a_bos_token():
    tokenizer = _tokenizer(NO_SYSTEM, bos_token=None)
    assert render(tokenizer, MESSAGES[1:]) == [USER, HI, END, ASSISTANT]


def test_rendering_leaves_the_messages_alone():
    before = [dict(message) for message in MESSAGES]
    render(_tokenizer(NO_SYSTEM), MESSAGES)
    assert MESSAGES == before


def test_refuses_a_tokenizer_without_a_template():
    with pytest.raises(ValueError, match="no chat template; use an instruction-tuned model"):
        render(_tokenizer(None), MESSAGES)


def test_passes_on_why_a_template_refuses():
    with pytest.raises(ValueError, match="refuses the messages: not today") as caught:
        render(_tokenizer(REFUSES_ALL), MESSAGES)
    assert isinstance(caught.value.__cause__, jinja2.TemplateError)


@pytest.mark.parametrize(
    "representation, blocks",
    [
        (
            "atomic",
            "[1] The user is vegan. The user has a gas stove.\n"
            "[2] The user visited Oslo.\n"
            "[3] A cat. A dog. A drum.",
        ),
        (
            "fluent",
            "[1] A vegan with a gas stove.\n"
            "[2] Once went to Oslo.\n"
            "[3] Has a cat, a dog and a drum.",
        ),
    ],
)
def test_messages_hold_numbered_blocks_and_then_the_question(record, representation, blocks):
    assert build_messages(record, representation=representation) == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"Memories:\n{blocks}\n\nQuestion:\nWhat should I cook?"},
    ]


def test_messages_are_atomic_by_default(record):
    assert build_messages(record) == build_messages(record, representation="atomic")


def test_refuses_an_unknown_representation(record):
    with pytest.raises(ValueError, match="'atomic' or 'fluent', not 'prose'"):
        build_messages(record, representation="prose")


def test_messages_do_not_show_levels_or_rubrics():
    for record in load_records(sample_path("records.jsonl")):
        text = "".join(message["content"] for message in build_messages(record))
        for atom in record.atoms:
            assert atom.text.strip() in text
            assert atom.id not in text
            assert atom.rubric["correct_use"] not in text
