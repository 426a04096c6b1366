"""Conversations of many sessions with questions about them, in the LoCoMo format."""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Sequence

from memcalib_jax.memory.words import count_words

CATEGORIES = {1: "multi_hop", 2: "temporal", 3: "open_domain", 4: "single_hop", 5: "adversarial"}
ADVERSARIAL = 5

LOCOMO_SPLITS = {
    "train": ("conv-43", "conv-47"),
    "validation": ("conv-44",),
    "test": ("conv-41", "conv-49", "conv-50", "conv-42", "conv-48", "conv-30", "conv-26"),
}
"""The paper's 2:1:7 split of LoCoMo, by conversation id."""

_SESSION_KEY = re.compile(r"session_(\d+)")
_DIA_ID = re.compile(r"D(\d+):(\d+)")


class ConversationError(ValueError):
    """A conversation cannot be used; says which file, conversation and field, and why."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One utterance; `caption` describes the image sent with it, "" where there is none."""

    dia_id: str
    speaker: str
    text: str
    caption: str = ""

    @property
    def shown(self) -> str:
        """What a model reads of it: the text, and what its image shows."""
        if not self.caption:
            return self.text
        return f"{self.text} [Sent an image showing {self.caption}]".lstrip()


@dataclasses.dataclass(frozen=True)
class Session:
    """Turns of one meeting, at least one; `time` is as the file has it."""

    number: int
    time: str
    turns: tuple[Turn, ...]

    @functools.cached_property
    def num_words(self) -> int:
        """Words of the texts; captions do not count."""
        return sum(count_words(turn.text) for turn in self.turns)

    def chunks(self, count: int) -> list[tuple[Turn, ...]]:
        """Cuts the session into `count` chunks of equal size; the last may be shorter or empty."""
        size = -(-len(self.turns) // count)
        return [self.turns[start * size:(start + 1) * size] for start in range(count)]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about a conversation.

    `evidence` names the turns that answer it, each once; a turn that the conversation lacks is
    named too where the file does so. `index` is its place in the file. `category` is LoCoMo's
    number, or the name that another benchmark has for its own. `latest` is the session that it
    counts in where it has no evidence; None: without evidence it is not scored.
    """

    index: int
    text: str
    answer: str
    category: int | str
    evidence: tuple[str, ...]
    latest: int | None = None

    @functools.cached_property
    def sessions(self) -> frozenset[int]:
        """The sessions that evidence lies in."""
        return frozenset(session_of(dia_id) for dia_id in self.evidence)

    @property
    def scored(self) -> bool:
        """Whether it has an answer to score and evidence: all but adversarial ones."""
        return self.category != ADVERSARIAL and (bool(self.evidence) or self.latest is not None)

    @property
    def last_session(self) -> int:
        """The session after which it can be answered; 0 where nothing says which."""
        return max(self.sessions, default=self.latest or 0)


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Sessions of two speakers, by rising number, and the questions in file order."""

    id: str
    speakers: tuple[str, str]
    sessions: tuple[Session, ...]
    questions: tuple[Question, ...]

    def first_sessions(self, count: int) -> "Conversation":
        """Returns the sessions up to number `count`, with the questions that they answer."""
        sessions = tuple(session for session in self.sessions if session.number <= count)
        if not sessions:
            raise ConversationError(f"{self.id} has no session up to number {count}")
        return dataclasses.replace(self, sessions=sessions, questions=tuple(
            question for question in self.questions if question.last_session <= count))

    def questions_until(self, session: int, *, only: bool = False) -> list[Question]:
        """Returns the scored questions whose latest evidence lies in a session up to this one.

        With `only`, those whose latest evidence lies in it.
        """
        return [question for question in self.questions if question.scored
                and (question.last_session == session if only
                     else question.last_session <= session)]

    def words_until(self, session: int) -> int:
        """Counts the words of the sessions up to this one."""
        return sum(s.num_words for s in self.sessions if s.number <= session)


def session_of(dia_id: str) -> int:
    """Returns the number of the session that a turn's id, such as D3:12, names."""
    return int(_DIA_ID.fullmatch(dia_id)[1])


def parse_evidence(texts: Sequence) -> tuple[str, ...]:
    """Returns the turn ids that texts name, each once and without leading zeros.

    A text may name several, with anything between them; what names no turn is left out.
    """
    found = (match for text in texts if isinstance(text, str) for match in _DIA_ID.finditer(text))
    return tuple(dict.fromkeys(f"D{int(match[1])}:{int(match[2])}" for match in found))


def load_conversations(path: str | os.PathLike) -> list[Conversation]:
    """Reads a file in the LoCoMo format: one JSON list of conversations.

    Sessions are taken by their number, in whatever order the file has them; numbers may be
    missing, and a session without turns is none.

    Raises:
      ConversationError: the file is no such list, or a conversation has no session, a turn of
        another speaker or session, a repeated turn, or a field that is missing or of another type.
    """
    path = os.fspath(path)
    try:
        with open(path, encoding="utf-8-sig") as file:
            rows = json.load(file)
    except (OSError, ValueError) as error:
        raise ConversationError(f"{path} cannot be read: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise ConversationError(f"{path} must hold a list of conversations, at least one")
    conversations = [_Reader(path, row, number).read() for number, row in enumerate(rows, 1)]
    ids = [conversation.id for conversation in conversations]
    for id in ids:
        if ids.count(id) > 1:
            raise ConversationError(f"{path}: the id {id!r} is repeated")
    return conversations


class _Reader:
    """One conversation of a file, and where it stands for messages."""

    def __init__(self, path: str, row, number: int):
        self._row = row
        self._where = f"{path}, conversation {number}"

    def read(self) -> Conversation:
        id = self._get(self._row, "sample_id", str)
        self._where += f" ({id})"
        body = self._get(self._row, "conversation", dict)
        speakers = tuple(self._get(body, f"speaker_{letter}", str) for letter in "ab")
        if not all(speakers) or speakers[0] == speakers[1]:
            raise self._error("speaker_a and speaker_b must be two different names")
        sessions = self._sessions(body, speakers)
        questions = tuple(self._question(index, row) for index, row in
                          enumerate(self._get(self._row, "qa", list)))
        return Conversation(id, speakers, sessions, questions)

    def _sessions(self, body, speakers):
        numbers = sorted(int(match[1]) for match in map(_SESSION_KEY.fullmatch, body) if match)
        sessions = []
        for number in numbers:
            rows = self._get(body, f"session_{number}", list)
            if not rows:
                continue
            time = self._get(body, f"session_{number}_date_time", str)
            turns = tuple(self._turn(row, number, speakers) for row in rows)
            seen = {turn.dia_id for turn in turns}
            if len(seen) < len(turns):
                raise self._error(f"session_{number} has a dia_id twice")
            sessions.append(Session(number, time, turns))
        if not sessions:
            raise self._error("there is no session with a turn")
        return tuple(sessions)

    def _turn(self, row, number, speakers):
        where = f"session_{number}: "
        dia_id, speaker, text = (self._get(row, name, str, where)
                                 for name in ("dia_id", "speaker", "text"))
        if speaker not in speakers:
            raise self._error(f"{where}turn {dia_id} is by {speaker!r}, who is neither "
                              f"{speakers[0]!r} nor {speakers[1]!r}")
        if not _DIA_ID.fullmatch(dia_id) or session_of(dia_id) != number:
            raise self._error(f"{where}dia_id must be D{number}:<turn>, not {dia_id!r}")
        caption = row.get("blip_caption") or ""
        return Turn(parse_evidence([dia_id])[0], speaker, text, str(caption).strip())

    def _question(self, index, row):
        where = f"question {index + 1}: "
        text, category = self._get(row, "question", str, where), self._get(
            row, "category", int, where)
        if category not in CATEGORIES:
            raise self._error(f"{where}category must be one of 1 to 5, not {category}")
        answer = row.get("answer")
        if answer is None and category != ADVERSARIAL:
            raise self._error(f"{where}answer is missing")
        return Question(index, text, "" if answer is None else str(answer), category,
                        parse_evidence(self._get(row, "evidence", list, where)))

    def _get(self, row, name, kind, where=""):
        value = row.get(name) if isinstance(row, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self._error(f"{where}{name} must be there and be of type {kind.__name__}")
        return value

    def _error(self, problem):
        return ConversationError(f"{self._where}: {problem}")
