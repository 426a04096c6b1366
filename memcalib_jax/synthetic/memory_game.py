"""A memory of many sessions, small enough to know which session caused each failure.

Each session brings facts. What is the case may be told anew later, and small talk is asked about
never. With each fact the player sees the memory that resembles it most, which may be one of
something else, and inserts the fact, overwrites that memory, or leaves the fact. An exact answerer
reads the bank. To overwrite a memory of something else keeps the fact of this session and loses
that of another, so that sessions which did nothing wrong fail by what comes after them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from memcalib_jax.memory.bank import Bank, Insert, NoOperation, Update
from memcalib_jax.memory.conversations import Question
from memcalib_jax.memory.rewards import bank_reward, excess_ratio, session_rewards
from memcalib_jax.memory.words import count_words

CONTEXTS = ("new", "known", "small_talk")
ACTIONS = ("insert", "overwrite", "leave")
RIGHT = {"new": "insert", "known": "overwrite", "small_talk": "leave"}

FACTS = 3
SINGLE_HOP = 4

_SPEAKERS = ("Ada", "Ben")
_TOLD_AGAIN = 0.35


@dataclasses.dataclass(frozen=True)
class Fact:
    """Says that a thing is so; without a `thing` it is small talk.

    `resembles`, in [0, 1), chooses the memory that is shown with it where the bank has none of
    its thing.
    """

    thing: int | None
    value: int
    resembles: float

    @property
    def text(self) -> str:
        """Six words, as a session has it and a memory keeps it."""
        about = "weather" if self.thing is None else f"thing{self.thing}"
        return f"{about} is today at value {self.value}"


@dataclasses.dataclass(frozen=True)
class Game:
    """The facts of each session, `FACTS` each; sessions count from 1."""

    sessions: tuple[tuple[Fact, ...], ...]

    @functools.cached_property
    def told(self) -> dict[int, dict[int, int]]:
        """For each thing, the sessions that told it and the values they told."""
        told = {}
        for session, facts in enumerate(self.sessions, 1):
            for fact in facts:
                if fact.thing is not None:
                    told.setdefault(fact.thing, {})[session] = fact.value
        return told

    def questions(self, until: int | None = None) -> list[Question]:
        """Asks each thing, the question's index, whose last telling is in a session up to this."""
        until = until or len(self.sessions)
        return [Question(thing, f"What is thing{thing} at?", str(self.truth(thing, until)),
                         SINGLE_HOP, tuple(f"D{session}:{thing}" for session in tellings))
                for thing, tellings in self.told.items() if max(tellings) <= until]

    def truth(self, thing: int, session: int) -> int | None:
        """Returns what a thing is after a session; None before it is told."""
        values = [value for at, value in self.told[thing].items() if at <= session]
        return values[-1] if values else None


@dataclasses.dataclass(frozen=True)
class Move:
    """What was done in a session: for each fact the context met and the action taken."""

    contexts: tuple[int, ...]
    actions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Play:
    """A way through the sessions: banks[t] is the bank after t of them."""

    moves: tuple[Move, ...]
    banks: tuple[Bank, ...]


def draw_game(random: np.random.Generator, num_sessions: int = 8) -> Game:
    """Draws a game: each session has two facts, each new or told again, and small talk."""
    sessions, things = [], 0
    for _ in range(num_sessions):
        facts, before = [], things
        for _ in range(FACTS - 1):
            open_things = [t for t in range(before) if t not in {fact.thing for fact in facts}]
            if open_things and random.random() < _TOLD_AGAIN:
                thing = int(random.choice(open_things))
            else:
                thing, things = things, things + 1
            facts.append(_fact(random, thing))
        sessions.append((*facts, _fact(random, None)))
    return Game(tuple(sessions))


def _fact(random, thing):
    return Fact(thing, int(random.integers(10**6)), float(random.random()))


def empty_bank() -> Bank:
    """Returns the bank that every play starts from."""
    return Bank(_SPEAKERS)


Choose = Callable[[int], int]
"""Takes a context's number in `CONTEXTS`, returns an action's in `ACTIONS`."""


def play_session(game: Game, session: int, bank: Bank, choose: Choose) -> tuple[Move, Bank]:
    """Plays one session from a bank; the memories shown are those of sessions before it."""
    contexts, actions = [], []
    before = list(bank.entries.values())
    for fact in game.sessions[session - 1]:
        shown = _most_alike(before, fact)
        context = CONTEXTS.index(_context(shown, fact))
        action = choose(context)
        bank, _ = bank.apply([_operation(ACTIONS[action], fact, shown, session)],
                             session=session, time="")
        contexts.append(context)
        actions.append(action)
    return Move(tuple(contexts), tuple(actions)), bank


def play(game: Game, choose: Choose) -> Play:
    """Plays all sessions from the empty bank."""
    moves, banks = [], [empty_bank()]
    for session in range(1, len(game.sessions) + 1):
        move, bank = play_session(game, session, banks[-1], choose)
        moves.append(move)
        banks.append(bank)
    return Play(tuple(moves), tuple(banks))


def _most_alike(entries, fact):
    same = [entry for entry in entries if fact.thing is not None
            and _thing_of(entry) == fact.thing]
    if same:
        return same[0]
    return entries[int(fact.resembles * len(entries))] if entries else None


def _context(shown, fact):
    if fact.thing is None:
        return "small_talk"
    return "known" if shown and _thing_of(shown) == fact.thing else "new"


def _operation(action, fact, shown, session):
    turn = f"D{session}:{fact.value}"
    if action == "insert" or (action == "overwrite" and not shown):
        return Insert(_SPEAKERS[0], fact.text, turn)
    if action == "overwrite":
        return Update(shown.id, fact.text, turn)
    return NoOperation()


def _thing_of(entry):
    about = entry.content.split()[0]
    return int(about[len("thing"):]) if about.startswith("thing") else None


def answer(bank: Bank, thing: int) -> int | None:
    """Returns the value of the oldest memory of a thing; None where there is none."""
    for entry in bank.entries.values():
        if _thing_of(entry) == thing:
            return int(entry.content.split()[-1])
    return None


def is_right(game: Game, bank: Bank, thing: int, session: int) -> bool:
    """Says whether the bank after a session answers as the sessions up to it have it."""
    return answer(bank, thing) == game.truth(thing, session)


def failures(game: Game, banks: Sequence[Bank], questions: Sequence[Question]) -> dict[int, int]:
    """Returns, for each thing that the last bank gets wrong, the session that caused it.

    That is the one since which the answer was wrong: it lost the memory, or told the thing and
    did not keep it.

    Args:
      game: what is true.
      banks: as in `Play`, up to some session.
      questions: what is asked after the last.
    """
    caused = {}
    for thing in (question.index for question in questions):
        session = len(banks) - 1
        while session >= min(game.told[thing]) and not is_right(
                game, banks[session], thing, session):
            caused[thing] = session
            session -= 1
    return caused


def global_rewards(game: Game, last: Bank) -> list[float]:
    """Returns each session's reward from the terminal bank, as the library attributes it."""
    end = len(game.sessions)
    exact = {question: float(is_right(game, last, question.index, end))
             for question in game.questions()}
    return list(session_rewards(exact, range(1, end + 1), _excess(game, last, end)).values())


def local_reward(game: Game, bank: Bank, session: int) -> float:
    """Returns a reroll's reward from the bank after it: all that can be asked by then counts."""
    exact = [float(is_right(game, bank, question.index, session))
             for question in game.questions(session)]
    return bank_reward(exact, _excess(game, bank, session))


def _excess(game, bank, session):
    told = sum(count_words(fact.text) for facts in game.sessions[:session] for fact in facts)
    return excess_ratio(bank.num_words, told)
