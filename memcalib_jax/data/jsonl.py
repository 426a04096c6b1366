"""JSON Lines and JSON files, read strictly: complaints name file, line, record and field."""

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from memcalib_jax import hub

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RecordError(ValueError):
    """Says that a data file is malformed, and where.

    Attributes: `path`; `line` (from 1; None where the whole file is meant); `record_id` (None
    where it could not be read); `field` (a JSON path such as `memories[2].u_star`, or None).
    """

    def __init__(self, problem: str, *, path=None, line=None, record_id=None, field=None):
        parts = [
            None if path is None else str(path),
            None if line is None else f"line {line}",
            None if record_id is None else f"record {record_id!r}",
            None if field is None else f"field {field}",
        ]
        where = ", ".join(part for part in parts if part)
        super().__init__(f"{where}: {problem}" if where else problem)
        self.path, self.line, self.record_id, self.field = path, line, record_id, field


class Oddities:
    """Collects what is odd but legal in one file, and warns once for each kind."""

    def __init__(self, path: str):
        self._path = path
        self._first_of_kind: dict[str, str] = {}

    def note(self, kind: str, line: int, what: str) -> None:
        """Remembers the first oddity of `kind`."""
        self._first_of_kind.setdefault(kind, f"{self._path}, line {line}: {what}")

    def warn(self) -> None:
        """Warns of every kind noted, on behalf of the caller's caller."""
        for message in self._first_of_kind.values():
            warnings.warn(f"{message} (only the first of its kind is shown)", stacklevel=3)


@dataclass
class JsonObject:
    """One JSON object that knows where it stands in its file."""

    value: dict
    path: str
    line: int | None
    record_id: str | None = None
    prefix: str = ""

    def error(self, problem: str, field: str | None = None) -> RecordError:
        """Makes the error for `field` of this object (or for the object itself)."""
        return RecordError(
            problem,
            path=self.path,
            line=self.line,
            record_id=self.record_id,
            field=".".join(part for part in (self.prefix, field) if part) or None,
        )

    def get(self, key: str, kind: type):
        """Returns the value of `key`, which must be there and of JSON type `kind`."""
        if key not in self.value:
            raise self.error("is missing", key)
        value = self.value[key]
        if type(value) is not kind:
            raise self.error(f"must be {_name(kind)}, not {_name(type(value))}", key)
        return value

    def text(self, key: str) -> str:
        """Returns the string under `key`, which must hold more than white space."""
        text = self.get(key, str)
        if not text.strip():
            raise self.error("must not be empty", key)
        return text

    def texts(self, key: str) -> list[str]:
        """Returns the list of non-empty strings under `key`."""
        texts = self.get(key, list)
        for index, text in enumerate(texts):
            if type(text) is not str:
                problem = f"must be a string, not {_name(type(text))}"
                raise self.error(problem, f"{key}[{index}]")
            if not text.strip():
                raise self.error("must not be empty", f"{key}[{index}]")
        return texts

    def objects(self, key: str) -> "list[JsonObject]":
        """Returns the list of objects under `key`."""
        objects = []
        for index, value in enumerate(self.get(key, list)):
            if type(value) is not dict:
                problem = f"must be an object, not {_name(type(value))}"
                raise self.error(problem, f"{key}[{index}]")
            prefix = f"{self.prefix}.{key}[{index}]".lstrip(".")
            objects.append(JsonObject(value, self.path, self.line, self.record_id, prefix))
        return objects

    def note_unknown_keys(self, known: set[str], oddities: Oddities) -> None:
        """Notes the keys that the format does not have."""
        for key in self.value:
            if key not in known:
                where = f" in {self.prefix}" if self.prefix else ""
                oddities.note("unknown key", self.line, f"unknown key {key!r}{where} is left out")


def read_objects(path: str | os.PathLike, oddities: Oddities) -> Iterator[JsonObject]:
    """Yields the object of every line; a line ends at a line feed and nowhere else.

    Takes hf://datasets/OWNER/NAME[@REVISION]/FILE for a path too, through the hub's cache.

    Raises:
      RecordError: the file is missing, unreadable, a folder or without any object, or a line is
        not one JSON object in UTF-8 with distinct keys and finite numbers.
    """
    path = os.fspath(path)
    lines = _read(path).split(b"\n")
    if not lines[-1]:
        lines.pop()
    empty = True
    for line, content in enumerate(lines, start=1):
        if line == 1 and content.startswith(_BYTE_ORDER_MARK):
            oddities.note("byte-order mark", line, "the file starts with a byte-order mark")
            content = content[len(_BYTE_ORDER_MARK) :]
        if content.strip():
            empty = False
            yield JsonObject(_parse(content, path, line), path, line)
        else:
            oddities.note("blank line", line, "blank line is skipped")
    if empty:
        raise RecordError("the file holds no record", path=path)


def read_array(path: str | os.PathLike) -> list[JsonObject]:
    """Returns the objects of a file that is one JSON array of them.

    Their `line` is None, and their prefix says which of the array they are. Paths and errors are
    those of `read_objects`.
    """
    path = os.fspath(path)
    value = _parse_value(_read(path).removeprefix(_BYTE_ORDER_MARK), path, None)
    if type(value) is not list or not value:
        problem = "must be a JSON array of at least one object"
        raise RecordError(problem if value != [] else "the file holds no record", path=path)
    for index, item in enumerate(value):
        if type(item) is not dict:
            problem = f"must be an object, not {_name(type(item))}"
            raise RecordError(problem, path=path, field=f"[{index}]")
    return [JsonObject(item, path, None, prefix=f"[{index}]") for index, item in enumerate(value)]


def read_document(path: str | os.PathLike) -> JsonObject:
    """Returns the one object that a file is; paths and errors are those of `read_objects`."""
    path = os.fspath(path)
    return JsonObject(_parse(_read(path).removeprefix(_BYTE_ORDER_MARK), path, None), path, None)


def _read(path: str) -> bytes:
    try:
        with open(hub.data_file(path) if hub.is_url(path) else path, "rb") as file:
            return file.read()
    except hub.HubError as error:
        raise RecordError(str(error)) from None
    except FileNotFoundError:
        problem = "there is no such file"
    except IsADirectoryError:
        problem = "this is a folder; give the .jsonl file in it"
    except OSError as error:
        problem = f"the file cannot be read ({error.strerror})"
    raise RecordError(problem, path=path)


def _parse(content: bytes, path: str, line: int) -> dict:
    value = _parse_value(content, path, line)
    if type(value) is not dict:
        problem = f"must be a JSON object, not {_name(type(value))}"
        raise RecordError(problem, path=path, line=line)
    return value


def _parse_value(content: bytes, path: str, line: int | None):
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        whole = "file" if line is None else "line"
        problem = f"is not UTF-8 (byte {error.start + 1} of the {whole})"
        raise RecordError(problem, path=path, line=line) from None
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeated_keys
        )
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        problem = "holds half of a surrogate pair, which is no character"
        raise RecordError(problem, path=path, line=line) from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"is not valid JSON ({error})", path=path, line=line) from None
    return value


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")


def _refuse_repeated_keys(pairs: list[tuple[str, object]]) -> dict:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {repeated!r} stands twice in one object")
    return value


def _name(kind: type) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return names.get(kind, "a boolean" if kind is bool else "a number")
