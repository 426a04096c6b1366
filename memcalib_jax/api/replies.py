"""Reads the JSON object of a model's reply."""

import json
import re

_FENCED = re.compile(r"```[a-zA-Z]*\s*\n(.*?)```", re.DOTALL)


def read_object(text: str) -> dict:
    """Returns the one JSON object of a reply: bare, fenced, or between other words.

    Raises:
      ValueError: there is none.
    """
    candidates = [text, *reversed(_FENCED.findall(text))]
    start, end = text.find("{"), text.rfind("}")
    if 0 <= start < end:
        candidates.append(text[start : end + 1])
    for candidate in candidates:
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    raise ValueError("no JSON object found")
