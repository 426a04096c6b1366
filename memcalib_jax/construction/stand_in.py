"""Serves a scripted stand-in that plays generator and reviewers: no model, and no judgment.

    python -m memcalib_jax.construction.stand_in --port 0 --port_file PATH

It makes the whole construction runnable on a laptop without an endpoint. It cuts sentences and
counts common words; what it makes has the form of a benchmark and is none.
"""

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager

from memcalib_jax.api.server import (
    ChatServer,
    add_port_options,
    last_user_object,
    serve_until_signal,
    serving,
)
from memcalib_jax.construction.assurance import REVIEW_CHECKS

MODEL_NAMES = ("scripted-generator", "scripted-reviewer-1", "scripted-reviewer-2")

_OWNER = "scripted stand-in, no model"
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'“])")
_STOP_WORDS = frozenset(
    """a about after again all also am an and any are as at be because been before but by can could
    did do does don't for from get had has have how i i'm if in into is it it's its just like more
    most my no not of off on one only or other our out over should so some than that the their them
    then there these they this to too up use user user's was we were what when where which while who
    why will with without would you your""".split())
_THIRD_PERSON = (
    (r"\bI['’]m\b", "the user is"), (r"\bI['’]ve\b", "the user has"),
    (r"\bI['’]d\b", "the user would"),
    (r"\bI am\b", "the user is"), (r"\bI have\b", "the user has"), (r"\bI was\b", "the user was"),
    (r"\bI\b", "the user"), (r"\b[Mm]y\b", "the user's"), (r"\bme\b", "the user"),
    (r"\b[Oo]ur\b", "the user's"), (r"\b[Ww]e\b", "the user's group"), (r"\bus\b", "them"),
    (r"\bmine\b", "the user's own"))
_ASIDES = (
    "The user once repainted a garden gate dark green.",
    "The user keeps a jar of buttons from old coats.",
    "The user saw a travelling circus as a child.",
    "The user's neighbour is learning the accordion.",
    "The user prefers window seats on long train journeys.",
    "The user's favourite mug has a chipped handle.",
    "The user took a photograph of a double rainbow in June.",
    "The user's cousin runs a small bookbinding workshop.",
    "The user lost an umbrella at the ferry terminal last autumn.",
    "The user has a half-finished jigsaw of a lighthouse.",
    "The user enjoys documentaries about deep-sea fish.",
    "The user's aunt grows prize-winning dahlias.",
    "The user once won a pumpkin-weighing contest.",
    "The user borrows detective novels from the library.",
    "The user's hallway clock runs four minutes fast.",
    "The user collects postcards of bridges.",
    "The user went to school with a champion fencer.",
    "The user's grandmother was a telegraph operator.",
    "The user dislikes the smell of fresh varnish.",
    "The user owns a pair of hand-knitted yellow socks.",
    "The user's street was resurfaced two summers ago.",
    "The user remembers the old cinema's velvet curtains.",
    "The user bought a second-hand globe at a flea market.",
    "The user's uncle tells the same joke every New Year.",
    "The user has visited three lighthouses on one coast.",
    "The user likes to hum while washing up.",
    "The user's first bicycle had a wicker basket.",
    "The user keeps ticket stubs in a biscuit tin.",
    "The user tried to learn calligraphy one winter.",
    "The user's colleague brings plum cake on Fridays.",
    "The user once found a message in a bottle.",
    "The user's kettle whistles in two tones.",
    "The user watched a meteor shower from a hay bale.",
    "The user has a nephew who builds model trains.",
    "The user's balcony faces a row of poplars.",
    "The user read a long biography of a mapmaker.")


def answer(body: dict) -> str:
    """Answers a request by its task.

    Raises:
      ValueError: the last user message names no task of the construction.
    """
    payload = last_user_object(body.get("messages"))
    task = payload.get("task")
    if task not in _TASKS:
        raise ValueError(f"task must be one of {', '.join(_TASKS)}, not {task!r}")
    return json.dumps(_TASKS[task](payload), ensure_ascii=False)


def stand_in_server(port: int) -> ChatServer:
    """Makes a server of the scripted models."""
    return ChatServer(port, dict.fromkeys(MODEL_NAMES, _OWNER), answer)


@contextmanager
def serve(port: int = 0) -> Iterator[ChatServer]:
    """Serves the scripted models from a thread of this process; port 0 takes a free one."""
    with serving(stand_in_server(port)) as server:
        yield server


def _words(text: str) -> frozenset[str]:
    return frozenset(word for word in (found.lower() for found in _WORD.findall(text))
                     if word not in _STOP_WORDS)


def _stems(text: str) -> frozenset[str]:
    return frozenset(word[:5] for word in _words(text))


def _share(part: frozenset, whole: frozenset) -> float:
    return len(part & whole) / len(part) if part else 0.0


def _screen(payload):
    asked = f"{payload['context']} {payload['question']}"
    common = _share(_stems(payload["reference_answer"]), _stems(asked))
    specific = _specifics(asked)
    reason = f"scripted: {common:.0%} of the answer's words are asked about, {specific} specifics"
    return {"coherent": common >= 0.12 or specific < 3, "extractable": specific >= 3,
            "reason": reason}


def _specifics(text: str) -> int:
    """Counts what looks particular: numbers, and names in the middle of a sentence."""
    names = re.findall(r"(?<=[a-z,;] )[A-Z][a-z]+", text)
    numbers = re.findall(r"\b(?:\d+|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|"
                         r"fourteen|fifteen|eighteen|twenty|thirty|forty|fifty|hundred)\b",
                         text.lower())
    return len(names) + len(numbers)


def _derive(payload):
    sentences = [text for text in _SENTENCE.split(payload["context"].strip()) if text]
    groups = [sentences[start:start + 2] for start in range(0, len(sentences), 2)]
    passages = [{"text": " ".join(map(_third_person, group)), "quotes": group} for group in groups]
    reply = {"passages": passages, "query": payload["question"]}
    return reply | ({"task_kind": "debugging" if "why" in payload["question"].lower()
                     else "planning"} if payload["domain"] == "coding" else {})


def _third_person(sentence: str) -> str:
    for pattern, instead in _THIRD_PERSON:
        sentence = re.sub(pattern, instead, sentence)
    return sentence[:1].upper() + sentence[1:]


def _annotate(payload):
    told = _stems(payload["reference_answer"])
    atoms = []
    for passage in payload["passages"]:
        for sentence in _SENTENCE.split(passage["text"]):
            used = _share(_stems(sentence), told)
            level = "C" if used >= 0.4 else "B" if used >= 0.15 else "A"
            atoms.append({"passage": passage["passage"], "text": sentence, "level": level,
                          "action": "ignore" if level == "A" else "apply"})
    return {"atoms": atoms}


def _distract(payload):
    draw = random.Random(hashlib.sha256(payload["query"].encode()).digest())
    topic = max(_words(payload["query"]) or {"this"}, key=lambda word: (len(word), word))
    others = draw.sample(_ASIDES, min(payload["number_of_others"], len(_ASIDES)))
    others += [f"The user's {number}th shelf holds an old almanac."
               for number in range(len(others) + 1, payload["number_of_others"] + 1)]
    return {"hard": f"The user once overheard strangers talk about {topic} on a ferry.",
            "others": others}


def _rubric(payload):
    levels = {"A": "leaves it out", "B": "lets it shape a detail", "C": "rests on it"}
    return {"rubrics": [{
        "number": atom["number"],
        "expected_answer_behavior": f"The answer {levels[atom['level']]}: {atom['text']}",
        "correct_use": f"The answer {levels[atom['level']]}.",
        "under_use": "Cannot happen." if atom["level"] == "A" else "Nothing of it shows.",
        "over_use": "It is mentioned." if atom["level"] == "A" else "It crowds out the rest.",
        "observable_checks": [f"The answer {levels[atom['level']]}."],
    } for atom in payload["atoms"]]}


def _naturalize(payload):
    return {"blocks": [{"id": block["id"], "text": " ".join(block["atoms"])}
                       for block in payload["blocks"]]}


def _review(payload):
    source = _stems(f"{payload['context']} {payload['question']}")
    memories = " ".join(block["text"] for block in payload["blocks"])
    passes = dict.fromkeys(REVIEW_CHECKS, True)
    passes["faithful"] = all(_share(_stems(text), source) >= 0.8
                             for text in payload["source_atoms"])
    passes["preserved"] = all(atom["text"] in block["text"]
                              for block in payload["blocks"] for atom in block["atoms"])
    passes["answerable"] = bool(_stems(payload["query"]) | _stems(memories))
    return {"checks": {name: {"pass": value, "reason": "" if value else "scripted: words differ"}
                       for name, value in passes.items()}}


def _respond(payload):
    by_level = {level: [item["statement"] for item in payload["guidance"]
                        if item["level"] == level] for level in "BC"}
    lines = [f"What decides: {text}" for text in by_level["C"]]
    lines += [f"A detail to keep in mind: {text}" for text in by_level["B"]]
    return {"response": "\n".join(lines) or "Take the plain course."}


def _verify(payload):
    def level(text):
        if f"What decides: {text}" in payload["response"]:
            return "C"
        return "B" if text in payload["response"] else "A"
    return {"atoms": [{"id": atom["id"], "level": level(atom["text"])}
                      for atom in payload["atoms"]],
            "quality": True, "safe": True, "reason": ""}


_TASKS = {"screen": _screen, "derive": _derive, "annotate": _annotate, "distract": _distract,
          "rubric": _rubric, "naturalize": _naturalize, "review": _review, "respond": _respond,
          "verify": _verify}


def main(arguments: list[str] | None = None) -> None:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m memcalib_jax.construction.stand_in",
        description="Serve scripted models on 127.0.0.1 that play the benchmark's construction. "
                    "They are no models.")
    add_port_options(parser)
    serve_until_signal(stand_in_server, parser.parse_args(arguments),
                       "a scripted stand-in for demonstrations and tests, no model")


if __name__ == "__main__":
    main()
