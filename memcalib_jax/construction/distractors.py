"""Stage 4, controlled distractors and a rubric for every atom."""

import random

from memcalib_jax.construction.annotation import refuse_repeated
from memcalib_jax.construction.decisions import Asker, BadReply, Rejected, list_of, text_of
from memcalib_jax.construction.layout import LayoutLimits, block_sizes, interleave

RUBRIC_TEXTS = ("expected_answer_behavior", "correct_use", "under_use", "over_use")
"""Fields of a rubric that are one text each; `observable_checks` is a list of texts."""


async def distract(sample: dict, ask: Asker, limits: LayoutLimits) -> dict:
    """Asks for one hard Ignore atom and as many others as the layout has room for, then rubrics.

    Raises:
      Rejected: too_many_atoms for the layout, or a bad reply: wrong_number, duplicate_atom,
        unknown_atom, missing_rubric, incomplete_rubric, malformed_reply.
    """
    source = sample["source_atoms"]
    sizes = block_sizes(sample["id"], len(source), limits)
    if sizes is None:
        raise Rejected("too_many_atoms", f"{len(source)} atoms and a distractor do not fit into "
                                         f"{limits.max_blocks} blocks of {limits.max_atoms}")
    texts = [atom["text"] for atom in source]
    number = sum(sizes) - len(source) - 1
    hard, others = await ask(
        "distract", {"domain": sample["domain"], "query": sample["query"], "atoms": texts,
                     "number_of_others": number},
        lambda reply: read_distractors(reply, texts, number))
    added = [_ignored(text, "other") for text in others]
    added.insert(_place_of_hard(sample["id"], len(added), limits), _ignored(hard, "hard"))
    own = [{key: atom[key] for key in ("text", "level", "action")} | {"origin": "source"}
           for atom in source]
    atoms = interleave(sample["id"], own, added, limits)
    for place, atom in enumerate(atoms, start=1):
        atom["number"] = place
    rubrics = await ask(
        "rubric", {"domain": sample["domain"], "query": sample["query"], "atoms": [
            {key: atom[key] for key in ("number", "text", "level", "action")} for atom in atoms]},
        lambda reply: read_rubrics(reply, len(atoms)))
    return {"block_sizes": list(sizes),
            "atoms": [atom | {"rubric": rubric}
                      for atom, rubric in zip(atoms, rubrics, strict=True)]}


def _ignored(text, origin):
    return {"text": text, "level": "A", "action": "ignore", "origin": origin}


def _place_of_hard(sample_id: str, num_others: int, limits: LayoutLimits) -> int:
    """Draws where among the distractors the hard one stands, so that its place tells nothing."""
    return random.Random(f"{limits.seed}/hard/{sample_id}").randint(0, num_others)


def read_distractors(reply: dict, atoms: list[str], number: int) -> tuple[str, list[str]]:
    """Reads `hard` and `number` `others`: texts that are none of the atoms and differ.

    Raises:
      BadReply: they are too few or many, or repeat one another or an atom.
    """
    hard = text_of(reply, "hard")
    others = reply.get("others")
    if not isinstance(others, list) or len(others) != number:
        found = len(others) if isinstance(others, list) else "no list"
        raise BadReply("wrong_number", f"{found} other distractors, not {number}")
    others = [text_of({"text": text}, "text", f"other {place}: ")
              for place, text in enumerate(others, start=1)]
    refuse_repeated([*atoms, hard, *others])
    return hard, others


def read_rubrics(reply: dict, num_atoms: int) -> list[dict]:
    """Reads the `rubrics`, one for the `number` of each atom, in order of the atoms.

    Raises:
      BadReply: one is missing, repeated, of no atom, or not complete.
    """
    found: dict[int, dict] = {}
    for item in list_of(reply, "rubrics"):
        number = item.get("number") if isinstance(item, dict) else None
        if type(number) is not int or not 1 <= number <= num_atoms:
            raise BadReply("unknown_atom", f"a rubric is for {number!r}, which is no atom")
        if number in found:
            raise BadReply("duplicate_atom", f"two rubrics are for atom {number}")
        found[number] = read_rubric(item, f"atom {number}: ")
    absent = set(range(1, num_atoms + 1)) - found.keys()
    if absent:
        raise BadReply("missing_rubric", f"atom {min(absent)} has no rubric")
    return [found[number] for number in range(1, num_atoms + 1)]


def read_rubric(item: dict, where: str = "") -> dict:
    """Reads a rubric's texts and its `observable_checks`.

    Raises:
      BadReply: incomplete_rubric.
    """
    try:
        rubric = {name: text_of(item, name, where) for name in RUBRIC_TEXTS}
        checks = list_of(item, "observable_checks", where)
        rubric["observable_checks"] = [text_of({"check": check}, "check", where)
                                       for check in checks]
    except BadReply as error:
        raise BadReply("incomplete_rubric", error.detail) from None
    return rubric
