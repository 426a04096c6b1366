"""What a teacher is shown: a record's prompt with the levels and rubrics of its atoms."""

import json

from memcalib_jax.data.prompts import build_messages
from memcalib_jax.data.records import LEVELS, Record

TEACHER_INSTRUCTIONS = """\
After the question you find, for every statement in the memories, the level at which a good answer
uses it, and a rubric that says what fitting, too little and too much use look like:

A (Ignore): the answer reads as if the statement were not there.
B (Bound): the statement may shape a detail, an example or a caveat, but no main conclusion.
C (Control): a main conclusion, constraint or recommendation rests on the statement.

Answer the question so that every statement is used at its level. Write only the answer, as you
would without this guidance: do not mention levels, rubrics or the guidance itself."""


def teacher_messages(
    record: Record,
    *,
    representation: str = "atomic",
    instructions: str = TEACHER_INSTRUCTIONS,
) -> list[dict]:
    """Makes the chat messages that ask a record's question with guidance (E.2, arXiv 2609.24259).

    The system message of `build_messages` goes on with the instructions, its user message with a
    JSON list of the atoms: text, ideal level and rubric, in file order.

    Raises:
      ValueError: `representation` is none.
    """
    system, user = build_messages(record, representation=representation)
    guidance = [{"statement": atom.text, "level": LEVELS[atom.ideal], "rubric": atom.rubric}
                for atom in record.atoms]
    listed = json.dumps(guidance, ensure_ascii=False, indent=1)
    return [
        system | {"content": f"{system['content']}\n\n{instructions}"},
        user | {"content": f"{user['content']}\n\nHow to use the memories:\n{listed}"},
    ]
