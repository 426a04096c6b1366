"""Stage 3, atomic annotation: passages become statements, each with its ideal use level."""

from memcalib_jax.construction.decisions import Asker, BadReply, Rejected, list_of, text_of
from memcalib_jax.data.records import ACTIONS, LEVELS


async def annotate(sample: dict, ask: Asker) -> dict:
    """Asks for the atoms of the passages, with levels and what an answer does with them.

    Raises:
      Rejected: no_used_atom (no Bound or Control), or a bad reply: unknown_passage,
        passage_without_atom, order_changed, duplicate_atom, unknown_level, unknown_action,
        malformed_reply.
    """
    passages = [passage["text"] for passage in sample["passages"]]
    payload = {"query": sample["query"], "reference_answer": sample["reference_answer"],
               "passages": [{"passage": number, "text": text}
                            for number, text in enumerate(passages, start=1)]}
    atoms = await ask("annotate", payload, lambda reply: read_atoms(reply, len(passages)))
    if all(atom["level"] == "A" for atom in atoms):
        raise Rejected("no_used_atom", f"all {len(atoms)} atoms are to be ignored")
    return {"source_atoms": atoms}


def read_atoms(reply: dict, num_passages: int) -> list[dict]:
    """Reads the `atoms`, in order of their passages: `passage`, `text`, `level`, `action`.

    Raises:
      BadReply: they do not cover the passages in order, or one is malformed or repeated.
    """
    atoms = []
    for number, item in enumerate(list_of(reply, "atoms"), start=1):
        where = f"atom {number}: "
        text, level, action = (text_of(item, key, where) for key in ("text", "level", "action"))
        passage = item.get("passage")
        if type(passage) is not int or not 1 <= passage <= num_passages:
            raise BadReply("unknown_passage", f"{where}{passage!r} is no passage")
        if level not in tuple(LEVELS):
            raise BadReply("unknown_level", f"{where}{level!r} is none of {', '.join(LEVELS)}")
        if action not in ACTIONS or (level == "A") != (action == "ignore"):
            raise BadReply("unknown_action", f"{where}{action!r} does not go with level {level}")
        atoms.append({"passage": passage, "text": text, "level": level, "action": action})
    order = [atom["passage"] for atom in atoms]
    if order != sorted(order):
        raise BadReply("order_changed", "the atoms are not in the order of the passages")
    absent = set(range(1, num_passages + 1)) - set(order)
    if absent:
        raise BadReply("passage_without_atom", f"passage {min(absent)} has no atom")
    refuse_repeated([atom["text"] for atom in atoms])
    return atoms


def refuse_repeated(texts: list[str]) -> None:
    """Refuses a statement that stands twice.

    Raises:
      BadReply: duplicate_atom.
    """
    seen = set()
    for text in texts:
        plain = " ".join(text.casefold().split()).rstrip(".")
        if plain in seen:
            raise BadReply("duplicate_atom", f"{text!r} stands twice")
        seen.add(plain)
