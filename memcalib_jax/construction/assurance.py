"""Stage 6, quality assurance: deterministic checks, then two reviewers who must both approve."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from memcalib_jax.construction.decisions import Asker, BadReply, Rejected, text_of, truth_of
from memcalib_jax.construction.distractors import read_rubric
from memcalib_jax.data.records import ACTIONS, DOMAINS, LEVELS

REVIEW_CHECKS = ("faithful", "distinct", "no_leak", "answerable", "preserved", "nothing_added",
                 "levels", "rubrics")
"""What a reviewer passes or fails a sample on."""


async def assure(sample: dict, reviewers: Sequence[Asker]) -> dict:
    """Checks a finished sample, and has every reviewer judge it by itself.

    Raises:
      Rejected: what `check_record` finds, or review_<check>: the first check of `REVIEW_CHECKS`
        that a reviewer failed; the detail says who and why.
    """
    record = record_of(sample)
    check_record(record)
    payload = {
        **{name: sample[name] for name in ("context", "question", "reference_answer", "query")},
        "source_atoms": [atom["text"] for atom in sample["source_atoms"]],
        "blocks": [{"id": block["parent_memory_id"], "text": block["memory_text"],
                    "atoms": [{"id": atom["atom_id"], "text": atom["text"],
                               "level": atom["u_star"], "rubric": atom["usage_rubric"]}
                              for atom in record["memories"]
                              if atom["parent_memory_id"] == block["parent_memory_id"]]}
                   for block in record["memory_blocks"]],
    }
    reviews = await _all([ask("review", payload, read_review) for ask in reviewers])
    failed = [(check, number, review[check]["reason"]) for check in REVIEW_CHECKS
              for number, review in enumerate(reviews, start=1) if not review[check]["pass"]]
    if failed:
        detail = "; ".join(f"reviewer {number}: {check}: {reason}"
                           for check, number, reason in failed)
        raise Rejected(f"review_{failed[0][0]}", detail)
    return {"reviews": reviews}


async def _all(calls):
    """Waits for all calls, then raises the first failure: none is left running, none is lost."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def read_review(reply: dict) -> dict:
    """Reads `checks`: `pass` and `reason` by each name of `REVIEW_CHECKS`.

    Raises:
      BadReply: one is missing or malformed.
    """
    checks = reply.get("checks")
    if not isinstance(checks, dict):
        raise BadReply("malformed_reply", "checks is missing or no object")
    review = {}
    for name in REVIEW_CHECKS:
        if name not in checks:
            raise BadReply("incomplete_review", f"{name} is not judged")
        passes = truth_of(checks[name], "pass", f"{name}: ")
        reason = "" if passes else text_of(checks[name], "reason", f"{name}: ")
        review[name] = {"pass": passes, "reason": reason}
    return review


def record_of(sample: Mapping) -> dict:
    """Lays a sample out as a MemCalib record, without provenance."""
    home = {atom_id: block["id"] for block in sample["blocks"] for atom_id in block["atom_ids"]}
    ids = [atom_id for block in sample["blocks"] for atom_id in block["atom_ids"]]
    atoms = dict(zip(ids, sample["atoms"]))
    return {
        "id": sample["id"],
        "domain": sample["domain"],
        "question": sample["query"],
        "memory_blocks": [
            {"parent_memory_id": block["id"], "memory_text": block["text"],
             "atomic_concat_text": " ".join(atoms[atom_id]["text"].strip()
                                            for atom_id in block["atom_ids"]),
             "atom_ids": block["atom_ids"]}
            for block in sample["blocks"]],
        "memories": [
            {"atom_id": atom_id, "parent_memory_id": home[atom_id], "text": atom["text"],
             "u_star": atom["level"], "memory_action": atom["action"],
             "usage_rubric": atom["rubric"]}
            for atom_id, atom in atoms.items()],
    }


def check_record(record: Mapping) -> None:
    """Checks that a record is whole.

    Raises:
      Rejected: missing_query, unknown_domain, missing_block, missing_text, missing_atom,
        unknown_level, unknown_action, no_used_atom, incomplete_rubric, atom_in_no_block,
        atom_in_two_blocks, order_changed, concatenation.
    """
    if not (record.get("question") or "").strip():
        raise Rejected("missing_query")
    if record.get("domain") not in DOMAINS:
        raise Rejected("unknown_domain", str(record.get("domain")))
    blocks, atoms = record.get("memory_blocks"), record.get("memories")
    if not blocks:
        raise Rejected("missing_block", "there is no memory block")
    if not atoms:
        raise Rejected("missing_atom", "there is no atom")
    for atom in atoms:
        _check_atom(atom)
    if all(atom["u_star"] == "A" for atom in atoms):
        raise Rejected("no_used_atom", "no atom is Bound or Control")
    for block in blocks:
        if not (block.get("memory_text") or "").strip():
            raise Rejected("missing_text", f"{block['parent_memory_id']} has no text")
    _check_membership(blocks, atoms)


def _check_atom(atom):
    name = atom.get("atom_id")
    if not name or not (atom.get("text") or "").strip():
        raise Rejected("missing_atom", f"{name!r} has no id or no text")
    if atom.get("u_star") not in tuple(LEVELS):
        raise Rejected("unknown_level", f"{name}: {atom.get('u_star')!r}")
    if atom.get("memory_action") not in ACTIONS:
        raise Rejected("unknown_action", f"{name}: {atom.get('memory_action')!r}")
    try:
        read_rubric(atom.get("usage_rubric") or {}, f"{name}: ")
    except BadReply as error:
        raise Rejected(error.reason, error.detail) from None


def _check_membership(blocks, atoms):
    listed = [atom_id for block in blocks for atom_id in block["atom_ids"]]
    counts = Counter(listed)
    by_id = {atom["atom_id"]: atom for atom in atoms}
    for atom_id in by_id:
        if not counts[atom_id]:
            raise Rejected("atom_in_no_block", f"{atom_id} is in no block")
    for atom_id, count in counts.items():
        if atom_id not in by_id:
            raise Rejected("missing_atom", f"a block names {atom_id!r}, which is no atom")
        if count > 1:
            raise Rejected("atom_in_two_blocks", f"{atom_id} is listed {count} times")
    if listed != [atom["atom_id"] for atom in atoms]:
        raise Rejected("order_changed", "the atoms are not in the order of the blocks")
    for block in blocks:
        texts = [by_id[atom_id]["text"].strip() for atom_id in block["atom_ids"]]
        homes = {by_id[atom_id]["parent_memory_id"] for atom_id in block["atom_ids"]}
        if homes != {block["parent_memory_id"]}:
            raise Rejected("atom_in_two_blocks", f"an atom of {block['parent_memory_id']} names "
                                                 "another block")
        if block["atomic_concat_text"] != " ".join(texts):
            raise Rejected("concatenation", f"{block['parent_memory_id']}: atomic_concat_text is "
                                            "not its atoms' texts")
