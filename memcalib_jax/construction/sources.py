"""Source rows: question-answer files of many formats, read row by row into one form.

A row that cannot be read is no reason to stop: it becomes a row with its problem, which screening
rejects by name.
"""

import gzip
import hashlib
import html.parser
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from memcalib_jax.data.jsonl import RecordError
from memcalib_jax.data.records import DOMAINS

FIELDS = ("id", "source", "domain", "context", "question", "reference_answer")
"""What a sample starts with: strings all."""


@dataclass(frozen=True)
class SourceRow:
    """One row: where it stands (`file.jsonl:12`), its sample, or why there is none."""

    place: str
    sample: dict[str, str] | None
    problem: tuple[str, str] | None = None


@dataclass(frozen=True)
class SourceFile:
    """A file to read: its path, format, and the domain of its rows (None: the format's own)."""

    path: str
    format: str = "fields"
    domain: str | None = None

    @classmethod
    def parse(cls, text: str) -> "SourceFile":
        """Reads `PATH`, `FORMAT:PATH` or `FORMAT@DOMAIN:PATH`.

        Raises:
          ValueError: there is no such format or domain.
        """
        head, colon, path = text.partition(":")
        name, at, domain = head.partition("@")
        if not colon or (name not in FORMATS and os.path.exists(text)):
            return cls(text)
        if name not in FORMATS:
            raise ValueError(f"{name!r} is none of the formats {', '.join(FORMATS)}")
        if at and domain not in DOMAINS:
            raise ValueError(f"{domain!r} is none of the domains {', '.join(DOMAINS)}")
        return cls(path, name, domain or None)


def read_rows(file: SourceFile, field_map: Mapping[str, str] | None = None) -> Iterator[SourceRow]:
    """Reads a file's rows in order: JSON Lines, or one JSON array; both may be gzipped.

    Args:
      file: what to read.
      field_map: for the format "fields", the row's key of a field of `FIELDS`; a value that starts
        with "=" is a constant. Fields that are left out have the key of their own name.

    Raises:
      RecordError: the file cannot be read, or is a damaged archive.
    """
    name = os.path.basename(file.path)
    if file.format == "fields":
        adapt = _by_fields(field_map or {})
    else:
        adapt = FORMATS[file.format]
    for place, value in adapt(_values(file.path, name)):
        if isinstance(value, tuple):
            yield SourceRow(place, None, value)
        else:
            sample = {"context": "", **value}
            if file.domain:
                sample["domain"] = file.domain
            yield SourceRow(place, sample, _wrong_type(sample))


def check_field_map(field_map: Mapping[str, str]) -> None:
    """Refuses a map of a field that samples do not have.

    Raises:
      ValueError: names it.
    """
    for field in field_map:
        if field not in FIELDS:
            raise ValueError(f"{field!r} is none of the fields {', '.join(FIELDS)}")


def _values(path: str, name: str) -> Iterator[tuple[str, dict | tuple[str, str]]]:
    """Yields each row's object, or its problem, with its place."""
    opened = gzip.open if path.endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            if file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                file.seek(0)
                items = _array(file.read())
                if items is not None:
                    yield from ((f"{name}{place}", item) for place, item in items)
                    return
            file.seek(0)
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield f"{name}:{number}", _object(line)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RecordError(f"the file cannot be read ({reason})", path=path) from None


def _array(data: bytes):
    """Returns the items of a file that is one JSON array, with their places; None if it is none."""
    try:
        items = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    wrong = ("malformed_row", "is no JSON object")
    return [(f"[{index}]", item if isinstance(item, dict) else wrong)
            for index, item in enumerate(items)]


def _object(line: bytes):
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "malformed_row", "is not UTF-8"
    except (ValueError, RecursionError) as error:
        return "malformed_row", f"is not valid JSON ({error})"
    return value if isinstance(value, dict) else ("malformed_row", "is no JSON object")


def _wrong_type(sample: Mapping) -> tuple[str, str] | None:
    for field in FIELDS:
        value = sample.get(field)
        if value is not None and not isinstance(value, str):
            return "malformed_row", f"{field} must be a string, not {type(value).__name__}"
        if value is not None and not _is_text(value):
            return "malformed_row", f"{field} holds half of a surrogate pair, which is no character"
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _by_fields(field_map: Mapping[str, str]):
    def adapt(rows):
        for place, row in rows:
            if isinstance(row, tuple):
                yield place, row
                continue
            keys = {field: field_map.get(field, field) for field in FIELDS}
            sample = {field: key[1:] if key.startswith("=") else row[key]
                      for field, key in keys.items() if key.startswith("=") or key in row}
            if isinstance(sample.get("id"), int):
                sample["id"] = str(sample["id"])
            yield place, sample
    return adapt


def _adapter(source: str, domain: str):
    """Makes an adapter of a function from one row to its fields, or to a problem."""
    def decorate(read: Callable[[dict], dict | tuple[str, str]]):
        def adapt(rows: Iterable):
            for place, row in rows:
                if not isinstance(row, tuple):
                    row = _adapted(read, row, source, domain)
                yield place, row
        adapt.__doc__ = read.__doc__
        return adapt
    return decorate


def _adapted(read, row, source, domain):
    try:
        fields = read(row)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        return "malformed_row", f"is no row of {source} ({type(error).__name__}: {error})"
    if isinstance(fields, tuple):
        return fields
    return fields | {"id": f"{source}-{_id_of(fields)}", "source": source, "domain": domain}


def _id_of(fields: Mapping[str, str]) -> str:
    """Returns the row's own id, or one of its content where the format has none."""
    if fields.get("id") not in (None, ""):
        return str(fields["id"])
    content = json.dumps([fields["question"], fields["reference_answer"]])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


@_adapter("meddialog", "health_seed")
def _meddialog(row):
    """MedDialog (English): `description` and `utterances`, or `dialogue_turns`."""
    if "utterances" in row:
        turns = [text.partition(":")[::2] for text in row["utterances"]]
    else:
        turns = row["dialogue_turns"]
        if isinstance(turns, dict):
            turns = [{"speaker": speaker, "utterance": text} for speaker, text in
                     zip(turns["speaker"], turns["utterance"], strict=True)]
        names = {0: "patient", 1: "doctor"}
        turns = [(names.get(turn["speaker"], turn["speaker"]), turn["utterance"])
                 for turn in turns]
    patient, doctor = (
        next((text.strip() for speaker, text in turns if speaker.strip().lower() == who), "")
        for who in ("patient", "doctor"))
    asked = (row.get("description") or "").strip()
    if asked.lower().startswith("q."):
        asked = asked[2:].strip()
    question, context = (asked, patient) if asked else (patient, "")
    return {"id": row.get("dialogue_id"), "context": context, "question": question,
            "reference_answer": doctor}


@_adapter("chatdoctor", "health_seed")
def _chatdoctor(row):
    """ChatDoctor: `instruction`, the same in all rows, `input` and `output`."""
    return {"question": row["input"], "reference_answer": row["output"]}


@_adapter("ultrachat", "general")
def _ultrachat(row):
    """UltraChat: `data`, user and assistant in turn; or `messages` with roles (the 200k form)."""
    if "data" in row:
        question, answer = row["data"][:2]
    else:
        question, answer = (
            next((message["content"] for message in row["messages"] if message["role"] == role), "")
            for role in ("user", "assistant"))
    return {"id": row.get("id", row.get("prompt_id")), "question": question,
            "reference_answer": answer}


def _openassistant(rows):
    """OpenAssistant: message trees, or flat messages in which a reply follows its parent."""
    roots = {}
    for place, row in rows:
        if isinstance(row, tuple):
            yield place, row
        elif "prompt" in row:
            yield place, _adapted(_tree, row, "openassistant", "general")
        elif "message_id" not in row:
            yield place, ("malformed_row", "is no row of openassistant (no prompt, no message_id)")
        elif row.get("parent_id") is None:
            roots[row["message_id"]] = row
        elif row["parent_id"] in roots and (row.get("rank") or 0) == 0:
            root = roots.pop(row["parent_id"])
            yield place, _adapted(_tree, {"prompt": root | {"replies": [row]}}, "openassistant",
                                  "general")


def _tree(row):
    prompt = row["prompt"]
    replies = [reply for reply in prompt["replies"] if not reply.get("deleted")]
    best = min(replies, key=lambda reply: (reply.get("rank") is None, reply.get("rank") or 0),
               default={"text": ""})
    if prompt.get("lang", "en") != "en":
        return "non_english", f"is marked as {prompt['lang']!r}"
    return {"id": prompt["message_id"], "question": prompt["text"],
            "reference_answer": best["text"]}


@_adapter("apps", "coding")
def _apps(row):
    """APPS: `question`, `solutions` (a list, or one as a JSON string), `starter_code`."""
    solutions = row["solutions"]
    if isinstance(solutions, str):
        solutions = json.loads(solutions) if solutions.strip() else []
    return {"id": row.get("problem_id", row.get("id")), "context": row.get("starter_code") or "",
            "question": row["question"], "reference_answer": solutions[0] if solutions else ""}


@_adapter("stack_exchange", "coding")
def _stack_exchange(row):
    """H4 Stack Exchange preferences: `question` and `answers` as HTML, with `pm_score`."""
    best = max(row["answers"], key=lambda answer: (bool(answer.get("selected")),
                                                   answer.get("pm_score", 0)))
    return {"id": row["qid"], "question": plain_text(row["question"]),
            "reference_answer": plain_text(best["text"])}


@_adapter("magicoder", "coding")
def _magicoder(row):
    """Magicoder-OSS-Instruct: `problem` and `solution`."""
    identity = row.get("index", row.get("raw_index"))
    return {"id": identity, "question": row["problem"], "reference_answer": row["solution"]}


FORMATS: dict[str, Callable] = {
    "fields": _by_fields,
    "meddialog": _meddialog,
    "chatdoctor": _chatdoctor,
    "ultrachat": _ultrachat,
    "openassistant": _openassistant,
    "apps": _apps,
    "stack_exchange": _stack_exchange,
    "magicoder": _magicoder,
}
"""Adapters by name; "fields" takes a field map."""


def plain_text(markup: str) -> str:
    """Takes the tags and entities out of HTML; code keeps its lines, paragraphs theirs."""
    reader = _Reader()
    reader.feed(markup)
    reader.close()
    lines = "".join(reader.parts).splitlines()
    return "\n".join(line.rstrip() for line in lines).strip()


class _Reader(html.parser.HTMLParser):
    _BREAKS = frozenset("p br li pre div tr h1 h2 h3 h4 h5 h6 blockquote".split())

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts = []

    def handle_starttag(self, tag, attrs):
        if tag in self._BREAKS:
            self.parts.append("\n")

    def handle_data(self, data):
        self.parts.append(data)
