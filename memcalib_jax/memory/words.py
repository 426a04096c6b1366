"""Counts of words, the unit in which memories and conversations are measured."""

import re

_WORD = re.compile(r"\b\w+\b")


def count_words(text: str) -> int:
    """Counts runs of word characters; what a model's tokenizer makes of a text plays no part."""
    return len(_WORD.findall(text.lower()))
