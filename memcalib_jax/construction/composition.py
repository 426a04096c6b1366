"""Stage 5, block composition and naturalization."""

from memcalib_jax.construction.decisions import Asker, BadReply, list_of, text_of

_LEAST_WORDS, _MOST_WORDS = 0.5, 2.5


async def compose(sample: dict, ask: Asker) -> dict:
    """Cuts the atoms into blocks of the drawn sizes, in order, and has each written as prose.

    Raises:
      Rejected: a bad reply: unknown_block, duplicate_block, missing_block, wrong_length (something
        was left out or added), not_naturalized (a list), malformed_reply.
    """
    blocks = cut(sample["atoms"], sample["block_sizes"])
    texts = await ask(
        "naturalize", {"blocks": [{"id": block["id"], "atoms": [atom["text"]
                                                                for atom in block["atoms"]]}
                                  for block in blocks]},
        lambda reply: read_blocks(reply, blocks))
    return {"blocks": [{"id": block["id"], "text": text,
                        "atom_ids": [atom["id"] for atom in block["atoms"]]}
                       for block, text in zip(blocks, texts, strict=True)]}


def cut(atoms: list[dict], sizes: list[int]) -> list[dict]:
    """Cuts atoms into blocks m1, m2, ... of these sizes; atoms of m2 are m2_a1, m2_a2, ..."""
    blocks, start = [], 0
    for number, size in enumerate(sizes, start=1):
        own = [atom | {"id": f"m{number}_a{place}"}
               for place, atom in enumerate(atoms[start:start + size], start=1)]
        blocks.append({"id": f"m{number}", "atoms": own})
        start += size
    return blocks


def read_blocks(reply: dict, blocks: list[dict]) -> list[str]:
    """Reads each block's `text` by its `id`, in the order of `blocks`.

    Raises:
      BadReply: one is missing, repeated or unknown, a list, or far from its atoms in length.
    """
    by_id = {block["id"]: block for block in blocks}
    found = {}
    for item in list_of(reply, "blocks"):
        name = text_of(item, "id", "a block: ")
        if name not in by_id:
            raise BadReply("unknown_block", f"{name!r} is no block")
        if name in found:
            raise BadReply("duplicate_block", f"{name} stands twice")
        found[name] = _checked_text(text_of(item, "text", f"{name}: "), by_id[name])
    absent = [name for name in by_id if name not in found]
    if absent:
        raise BadReply("missing_block", f"{absent[0]} has no text")
    return [found[name] for name in by_id]


def _checked_text(text: str, block: dict) -> str:
    words = len(text.split())
    of_atoms = sum(len(atom["text"].split()) for atom in block["atoms"])
    if not _LEAST_WORDS * of_atoms <= words <= max(_MOST_WORDS * of_atoms, of_atoms + 12):
        raise BadReply("wrong_length", f"{block['id']}: {words} words for atoms of {of_atoms}")
    if any(line.lstrip().startswith(("-", "*", "•", "1.")) for line in text.splitlines()):
        raise BadReply("not_naturalized", f"{block['id']} is a list")
    return text
