"""Built-in conversations, and the bank that a careful person would keep of each."""

import importlib.resources
import json
from pathlib import Path

from memcalib_jax.memory.bank import Bank, Insert, Update
from memcalib_jax.memory.conversations import Conversation, load_conversations

SPLITS = {
    "train": ("smp-conv-1", "smp-conv-2"),
    "validation": ("smp-conv-3",),
    "test": ("smp-conv-4",),
}


def sample_path() -> Path:
    """Returns the path of the built-in conversations, a file in the LoCoMo format."""
    return _folder() / "conversations.json"


def sample_conversations() -> list[Conversation]:
    """Returns the built-in conversations."""
    return load_conversations(sample_path())


def gold_bank(conversation: Conversation) -> Bank:
    """Returns the careful person's bank of a built-in conversation."""
    rows = json.loads((_folder() / "gold_banks.json").read_text(encoding="utf-8"))
    times = {session.number: session.time for session in conversation.sessions}
    bank = Bank(conversation.speakers, seed=conversation.id)
    for row in rows[conversation.id]:
        first, *others = row["dia_ids"]
        where = {"session": row["session"], "time": times[row["session"]]}
        bank, _ = bank.apply([Insert(row["speaker"], row["content"], first)], **where)
        made = list(bank.entries)[-1]
        bank, _ = bank.apply([Update(made, row["content"], turn) for turn in others], **where)
    return bank


def _folder() -> Path:
    return Path(str(importlib.resources.files(__name__)))
