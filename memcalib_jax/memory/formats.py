"""Other benchmarks of memory as conversations, each read by its own format: none is shipped.

A question that is asked on a certain day says so in its text, since its answer may depend on it.
"""

import os
from collections.abc import Callable, Sequence

from memcalib_jax.data.jsonl import JsonObject, Oddities, read_array, read_document, read_objects
from memcalib_jax.memory.conversations import (
    Conversation, Question, Session, Turn, load_conversations)

_USER, _ASSISTANT = "user", "assistant"
_MSC_SPEAKERS = ("Speaker 1", "Speaker 2")


def load_longmemeval(path: str | os.PathLike) -> list[Conversation]:
    """Reads LongMemEval (a JSON array): a conversation with one question an object.

    Sessions are put in the order of their dates. Evidence are the turns marked `has_answer`; the
    category is the question's type, or "abstention" where the id says that there is no answer.

    Raises:
      RecordError: the file is malformed; names object and field.
    """
    return [_longmemeval(row) for row in read_array(path)]


def _longmemeval(row: JsonObject) -> Conversation:
    id = row.record_id = row.text("question_id")
    dates, haystack = row.texts("haystack_dates"), row.get("haystack_sessions", list)
    if len(dates) != len(haystack):
        raise row.error(f"holds {len(haystack)} sessions and there are {len(dates)} dates",
                        "haystack_sessions")
    sessions, evidence = [], []
    order = sorted(range(len(dates)), key=lambda place: dates[place])
    for number, place in enumerate(order, 1):
        field = f"haystack_sessions[{place}]"
        turns = _objects(row, haystack[place], field)
        for n, turn in enumerate(turns, 1):
            if turn.get("role", str) not in (_USER, _ASSISTANT):
                raise turn.error(f"must be {_USER} or {_ASSISTANT}", "role")
            if turn.value.get("has_answer") is True:
                evidence.append(f"D{number}:{n}")
        sessions.append(_session(number, dates[place], [
            (turn.get("role", str), turn.get("content", str)) for turn in turns]))
    category = "abstention" if id.endswith("_abs") else row.text("question_type")
    text = f"{row.text('question')} (Asked on {row.text('question_date')}.)"
    question = Question(0, text, _answer(row, "answer"), category, tuple(evidence), len(sessions))
    return _conversation(row, id, (_USER, _ASSISTANT), sessions, [question])


def load_msc_self_instruct(path: str | os.PathLike) -> list[Conversation]:
    """Reads MSC-Self-Instruct (JSON Lines): earlier dialogs, the present one, and one question.

    In earlier dialogs the speakers take turns. There is no evidence: the question counts in the
    last session.

    Raises:
      RecordError: the file is malformed; names line and field.
    """
    rows = read_objects(path, Oddities(os.fspath(path)))
    return [_msc(row, number) for number, row in enumerate(rows, 1)]


def _msc(row: JsonObject, number: int) -> Conversation:
    row.record_id = f"msc-{number}"
    sessions = []
    for earlier in row.objects("previous_dialogs"):
        said = [(_MSC_SPEAKERS[place % 2], turn.get("text", str))
                for place, turn in enumerate(earlier.objects("dialog"))]
        back = earlier.value.get("time_back") or (
            f"{earlier.value.get('time_num')} {earlier.value.get('time_unit')} ago")
        sessions.append(_session(len(sessions) + 1, str(back), said))
    said = []
    for turn in row.objects("dialog"):
        if turn.get("id", str) not in _MSC_SPEAKERS:
            raise turn.error(f"must be {' or '.join(_MSC_SPEAKERS)}", "id")
        said.append((turn.get("id", str), turn.get("text", str)))
    sessions.append(_session(len(sessions) + 1, "now", said))
    asked = _inner(row, "self_instruct")
    question = Question(0, asked.text("B"), asked.text("A"), "consistency", (), len(sessions))
    return _conversation(row, row.record_id, _MSC_SPEAKERS, sessions, [question])


def load_membench(path: str | os.PathLike) -> list[Conversation]:
    """Reads MemBench (one JSON object of lists by category) as sampled for Memory-R2.

    A message gives a turn of the user and one of the assistant; a target step, (step, session),
    names the user's. The answer's text is scored; the choices are left out. An object whose `QA` is
    empty has no question.

    Raises:
      RecordError: the file is malformed; names category, object and field.
    """
    whole = read_document(path)
    rows = [(category, row) for category in whole.value if not category.startswith("_")
            for row in whole.objects(category)]
    return [_membench(row, category, number) for number, (category, row) in enumerate(rows, 1)]


def _membench(row: JsonObject, category: str, number: int) -> Conversation:
    row.record_id = f"membench-{number}"
    sessions, turn_of = [], {}
    for place, messages in enumerate(row.get("message_list", list)):
        said, time = [], ""
        for message in _objects(row, messages, f"message_list[{place}]"):
            step = message.value.get("sid", message.value.get("mid"))
            turn_of[step, place] = f"D{place + 1}:{len(said) + 1}"
            said += [(_USER, _either(message, "user_message", "user")),
                     (_ASSISTANT, _either(message, "assistant_message", "assistant"))]
            time = time or str(message.value.get("time") or "").strip("' ")
        sessions.append(_session(place + 1, time, said))
    asked = _inner(row, "QA")
    if not asked.value:
        return _conversation(row, row.record_id, (_USER, _ASSISTANT), sessions, [])
    targets = asked.value.get("target_step_id") or []
    if not isinstance(targets, list) or not all(
            isinstance(target, list) and list(map(type, target)) == [int, int]
            for target in targets):
        raise asked.error("must hold pairs of whole numbers", "target_step_id")
    evidence = [turn_of[tuple(target)] for target in targets if tuple(target) in turn_of]
    time = str(asked.value.get("time") or "").strip("' ")
    text = asked.text("question") + (f" (Asked on {time}.)" if time else "")
    question = Question(0, text, _answer(asked, "answer"), category,
                        tuple(dict.fromkeys(evidence)), len(sessions))
    return _conversation(row, row.record_id, (_USER, _ASSISTANT), sessions, [question])


LOADERS: dict[str, Callable[[str | os.PathLike], list[Conversation]]] = {
    "locomo": load_conversations,
    "longmemeval": load_longmemeval,
    "msc_self_instruct": load_msc_self_instruct,
    "membench": load_membench,
}
"""The benchmarks by name."""


def _objects(row: JsonObject, value, field: str) -> list[JsonObject]:
    """Returns the objects of a list within a list."""
    return JsonObject({field: value}, row.path, row.line, row.record_id, row.prefix).objects(field)


def _inner(row: JsonObject, field: str) -> JsonObject:
    prefix = ".".join(part for part in (row.prefix, field) if part)
    return JsonObject(row.get(field, dict), row.path, row.line, row.record_id, prefix)


def _either(row: JsonObject, *fields: str) -> str:
    """Returns the text of the first field that is there."""
    return row.get(next((field for field in fields if field in row.value), fields[0]), str)


def _answer(row: JsonObject, field: str) -> str:
    """Returns an answer, which may be a number."""
    value = row.value.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise row.error("must be a text or a number", field)
    return str(value)


def _session(number: int, time: str, said: Sequence[tuple[str, str]]) -> Session:
    return Session(number, time, tuple(
        Turn(f"D{number}:{place}", speaker, text)
        for place, (speaker, text) in enumerate(said, 1)))


def _conversation(row: JsonObject, id: str, speakers: tuple[str, str], sessions: list[Session],
                  questions: Sequence[Question]) -> Conversation:
    """Puts a conversation together without its empty sessions."""
    kept = tuple(session for session in sessions if session.turns)
    if not kept:
        raise row.error("there is no session with a turn")
    return Conversation(id, speakers, kept, tuple(questions))
