"""Agents that follow a script, for tests."""

import json

from memcalib_jax.memory.agents import Spoken


class Scripted:
    """Replies what `say(ask)` returns: a text, or a text and how it ended; keeps what was asked."""

    def __init__(self, say):
        self.say, self.asks = say, []

    def reply(self, asks):
        self.asks.append(list(asks))
        return [self._one(ask) for ask in asks]

    def _one(self, ask):
        said = self.say(ask)
        text, end = said if isinstance(said, tuple) else (said, "stop")
        if end in ("too_long", "failed"):
            return Spoken(ask.chat, "", end)
        chat = type(ask.chat)(ask.chat.answered(ask.text, text))
        return Spoken(chat, text, end)


def note_every_turn(ask):
    """An extractor that takes every turn for a fact."""
    facts = []
    for line in ask.text.splitlines():
        if line.startswith("[D"):
            dia_id, rest = line[1:].split("] ", 1)
            speaker, text = rest.split(": ", 1)
            facts.append({"speaker": speaker, "dia_id": dia_id, "fact": text})
    return json.dumps({"facts": facts})


def insert_every_fact(ask):
    """A manager that inserts every fact."""
    facts = json.loads(ask.text[ask.text.index("{"):])["facts"]
    return json.dumps({"operations": [
        {"operation": "INSERT", "speaker": fact["speaker"], "content": fact["fact"],
         "dia_id": fact["dia_id"]} for fact in facts]})
