"""A memory bank as a value: every change makes a new one, so that a snapshot is a reference."""

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from memcalib_jax.memory.words import count_words

MAX_HISTORY = 20


class BankError(ValueError):
    """A stored bank cannot be read; says which entry and field."""


@dataclasses.dataclass(frozen=True)
class Insert:
    """Asks for a new entry of what a turn says."""

    speaker: str
    content: str
    dia_id: str


@dataclasses.dataclass(frozen=True)
class Update:
    """Asks for another content of an entry, which the turn is added to."""

    memory_id: str
    content: str
    dia_id: str


@dataclasses.dataclass(frozen=True)
class Delete:
    """Asks for an entry to go."""

    memory_id: str


@dataclasses.dataclass(frozen=True)
class NoOperation:
    """Asks for nothing."""


Operation = Insert | Update | Delete | NoOperation

OUTCOMES = ("inserted", "merged", "updated", "deleted", "no_operation", "repeated", "unknown_id",
            "unknown_speaker")
"""What may become of an operation; the last four change nothing."""


@dataclasses.dataclass(frozen=True)
class Wording:
    """What an entry said before an update, and the session that replaced it."""

    content: str
    replaced_in: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """One memory.

    Attributes:
      id: names it in the bank.
      speaker: whom it is about.
      content: what it says now.
      session, time: those of the turn that it was first made from; updates keep them.
      dia_ids: the turns that it rests on, in the order in which they came.
      history: earlier wordings, oldest first, the last `MAX_HISTORY`.
    """

    id: str
    speaker: str
    content: str
    session: int
    time: str
    dia_ids: tuple[str, ...]
    history: tuple[Wording, ...] = ()

    def supported_by(self, dia_id: str) -> "Entry":
        """Returns the entry with a turn more; one that it has is not added again."""
        if not dia_id or dia_id in self.dia_ids:
            return self
        return dataclasses.replace(self, dia_ids=(*self.dia_ids, dia_id))

    def reworded(self, content: str, session: int) -> "Entry":
        """Returns the entry with another content and the old one in its history."""
        history = (*self.history, Wording(self.content, session))[-MAX_HISTORY:]
        return dataclasses.replace(self, content=content, history=history)


@dataclasses.dataclass(frozen=True)
class Bank:
    """What an agent remembers of one conversation.

    Attributes:
      speakers: who may be remembered.
      seed: with `made`, names the entries: equal banks that take equal operations stay equal.
      made: entries made so far, deleted ones included.
      entries: by id, in the order in which they were made.
    """

    speakers: tuple[str, ...]
    seed: str = ""
    made: int = 0
    entries: Mapping[str, Entry] = dataclasses.field(
        default_factory=lambda: MappingProxyType({}))

    def __len__(self) -> int:
        return len(self.entries)

    @functools.cached_property
    def dia_ids(self) -> frozenset[str]:
        """The turns that any entry rests on."""
        return frozenset(dia_id for entry in self.entries.values() for dia_id in entry.dia_ids)

    @functools.cached_property
    def num_words(self) -> int:
        """Words of all contents."""
        return sum(count_words(entry.content) for entry in self.entries.values())

    def apply(self, operations: Sequence[Operation], *, session: int,
              time: str) -> tuple["Bank", Counter]:
        """Carries out operations in order; one that cannot be is skipped and counted.

        An insert of what the bank holds of this speaker word for word only adds its turn. An
        update keeps the entry's session and time. A deleted entry takes its turns along, save
        those that others rest on too.

        Args:
          operations: a manager's.
          session, time: of the turns that the operations come from.

        Returns:
          The bank after them, and how many operations had each of `OUTCOMES`.
        """
        draft = _Draft(self, session, time)
        outcomes = Counter(draft.carry_out(operation) for operation in operations)
        return draft.finished(), outcomes

    def to_json(self) -> dict:
        """Returns the bank as JSON values."""
        entries = [{"id": entry.id, "speaker": entry.speaker, "content": entry.content,
                    "session": entry.session, "time": entry.time, "dia_ids": list(entry.dia_ids),
                    "history": [dataclasses.asdict(wording) for wording in entry.history]}
                   for entry in self.entries.values()]
        return {"speakers": list(self.speakers), "seed": self.seed, "made": self.made,
                "entries": entries}

    @classmethod
    def from_json(cls, value: dict) -> "Bank":
        """Reads what `to_json` returns.

        Raises:
          BankError: a field is missing or of another type, or an id is repeated.
        """
        entries = {}
        for number, row in enumerate(_field(value, "entries", list, "the bank"), start=1):
            entry = _read_entry(row, f"entry {number}")
            if entry.id in entries:
                raise BankError(f"entry {number} repeats the id {entry.id!r}")
            entries[entry.id] = entry
        return cls(_texts(value, "speakers", "the bank"), _field(value, "seed", str, "the bank"),
                   _field(value, "made", int, "the bank"), MappingProxyType(entries))


class _Draft:
    """A bank's entries while a list of operations changes them: one copy for all."""

    def __init__(self, bank: Bank, session: int, time: str):
        self._bank, self._session, self._time = bank, session, time
        self._entries, self._made = dict(bank.entries), bank.made

    def carry_out(self, operation: Operation) -> str:
        """Changes the entries; returns the outcome."""
        match operation:
            case Insert():
                return self._insert(operation)
            case NoOperation():
                return "no_operation"
        old = self._entries.get(operation.memory_id)
        if old is None:
            return "unknown_id"
        if isinstance(operation, Delete):
            del self._entries[old.id]
            return "deleted"
        new = old.supported_by(operation.dia_id)
        if operation.content != old.content:
            new = new.reworded(operation.content, self._session)
        return self._replace(old, new, "updated")

    def _insert(self, operation):
        if operation.speaker not in self._bank.speakers:
            return "unknown_speaker"
        for old in self._entries.values():
            if (old.speaker, old.content) == (operation.speaker, operation.content):
                return self._replace(old, old.supported_by(operation.dia_id), "merged")
        turns = (operation.dia_id,) if operation.dia_id else ()
        new = Entry(self._new_id(), operation.speaker, operation.content, self._session,
                    self._time, turns)
        self._entries[new.id] = new
        return "inserted"

    def _replace(self, old, new, outcome):
        self._entries[old.id] = new
        return "repeated" if new is old else outcome

    def _new_id(self):
        while True:
            name = hashlib.blake2s(f"{self._bank.seed}/{self._made}".encode(), digest_size=4)
            self._made += 1
            if name.hexdigest() not in self._entries:
                return name.hexdigest()

    def finished(self) -> Bank:
        """Returns the new bank, the old one itself where nothing changed."""
        if self._entries == self._bank.entries and self._made == self._bank.made:
            return self._bank
        return dataclasses.replace(self._bank, made=self._made,
                                   entries=MappingProxyType(self._entries))


def _read_entry(row, where: str) -> Entry:
    history = tuple(
        Wording(_field(old, "content", str, where), _field(old, "replaced_in", int, where))
        for old in _field(row, "history", list, where))
    texts = [_field(row, name, str, where) for name in ("id", "speaker", "content")]
    return Entry(*texts, _field(row, "session", int, where), _field(row, "time", str, where),
                 _texts(row, "dia_ids", where), history)


def _texts(row, name, where) -> tuple[str, ...]:
    texts = _field(row, name, list, where)
    if not all(isinstance(text, str) for text in texts):
        raise BankError(f"{where}: {name} must hold texts only")
    return tuple(texts)


def _field(row, name, kind, where):
    value = row.get(name) if isinstance(row, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BankError(f"{where}: {name} must be there and be of type {kind.__name__}")
    return value
