"""Prompts: a record as chat messages, and messages as the token ids of a model."""

from collections.abc import Collection

import jinja2

from memcalib_jax.data.records import Block, Record

REPRESENTATIONS = ("atomic", "fluent")

SYSTEM_PROMPT = (
    "You answer the user's question. You are also given memories about the user. Any of them may "
    "be irrelevant to the question or out of date. Let each piece of a memory shape your answer "
    "only as far as the question calls for: some decide it, some merely adjust a detail, many "
    "should leave no trace. Answer directly and keep it short."
)

_NO_MEMORIES = "(none)"


def build_messages(record: Record, *, representation: str = "atomic") -> list[dict]:
    """Makes the chat messages that ask a record's question with all of its memories.

    The user message holds the blocks, numbered from 1, and then the question. `representation`
    chooses how a block is worded: "atomic" (its atoms' texts, joined) or "fluent" (natural text).

    Raises:
      ValueError: `representation` is neither.
    """
    return compose(record, frozenset(), representation)


def compose(record: Record, removed: Collection[str], representation: str) -> list[dict]:
    """Makes the chat messages of a record without the atoms whose ids are in `removed`.

    A block that loses atoms is worded by the texts of the others, in order; a block that loses all
    of them is left out, and later blocks keep their numbers. With no block left, the memory
    section stays and says that there are none.
    """
    if representation not in REPRESENTATIONS:
        allowed = " or ".join(map(repr, REPRESENTATIONS))
        raise ValueError(f"representation must be {allowed}, not {representation!r}")
    text_of = {atom.id: atom.text.strip() for atom in record.atoms}
    texts = [_block_text(block, text_of, removed, representation) for block in record.blocks]
    numbered = [f"[{number}] {text}" for number, text in enumerate(texts, start=1) if text]
    memories = "\n".join(numbered) or _NO_MEMORIES
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"Memories:\n{memories}\n\nQuestion:\n{record.question}"},
    ]


def _block_text(
    block: Block, text_of: dict[str, str], removed: Collection[str], representation: str
) -> str:
    kept = [atom_id for atom_id in block.atom_ids if atom_id not in removed]
    if len(kept) < len(block.atom_ids):
        return " ".join(text_of[atom_id] for atom_id in kept)
    return block.atomic_text if representation == "atomic" else block.fluent_text


def render(tokenizer, messages: list[dict]) -> list[int]:
    """Turns messages into the token ids after which the model's answer begins.

    The whole text goes through the tokenizer's chat template (thinking off where the template
    knows it) and is tokenized at once. Where the template refuses or drops the system role, the
    system text opens the user message instead. At most one beginning-of-sequence token leads.

    Raises:
      ValueError: the tokenizer has no chat template, or its template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template; use an instruction-tuned model, or put the "
            "model's chat_template.jinja beside its tokenizer files"
        )
    ids = tokenizer.encode(_render_text(tokenizer, messages), add_special_tokens=False)
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


def _render_text(tokenizer, messages: list[dict]) -> str:
    system, *rest = messages
    if system["role"] != "system":
        return _apply_template(tokenizer, messages)
    try:
        text = _apply_template(tokenizer, messages)
    except ValueError:
        text = ""
    if system["content"].strip() in text:
        return text
    user, *rest = rest
    folded = {"role": user["role"], "content": f"{system['content']}\n\n{user['content']}"}
    return _apply_template(tokenizer, [folded, *rest])


def _apply_template(tokenizer, messages: list[dict]) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"the tokenizer's chat template refuses the messages: {error}") from error
