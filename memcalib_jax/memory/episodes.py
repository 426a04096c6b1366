"""Building memory session by session: whole trajectories, and sessions rerolled from one bank."""

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping, Sequence

from memcalib_jax.memory.agents import Agent, Ask, Chat, Identity
from memcalib_jax.memory.bank import Bank
from memcalib_jax.memory.conversations import Conversation, Session, Turn
from memcalib_jax.memory.retrieval import Retriever
from memcalib_jax.memory.roles import (
    Parsed, extractor_text, manager_text, merged_text, parse_facts, parse_operations)

ROLES = ("extract", "manage")
MERGED = ("merged",)


@dataclasses.dataclass(frozen=True)
class EpisodeConfig:
    """How memory is built.

    Attributes:
      num_chunks: parts of a session, K.
      roles: `ROLES`, or `MERGED`: one role that reads turns and writes operations.
      num_trajectories: global trajectories of a conversation, G.
      local_fraction: probability of a session to be rerolled; 0: GRPO on trajectories alone.
      num_rerolls: rerolls of a chosen session.
    """

    num_chunks: int = 6
    roles: tuple[str, ...] = ROLES
    num_trajectories: int = 16
    local_fraction: float = 0.5
    num_rerolls: int = 4

    def __post_init__(self):
        if self.roles not in (ROLES, MERGED):
            raise ValueError(f"roles must be {ROLES} or {MERGED}, not {self.roles}")
        for name in ("num_chunks", "num_trajectories", "num_rerolls"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0.0 <= self.local_fraction <= 1.0:
            raise ValueError(f"local_fraction must lie in [0, 1], not {self.local_fraction}")


@dataclasses.dataclass(frozen=True)
class Start:
    """A session to be read, and the bank that it is read with.

    `trajectory` numbers a reroll where there is an `anchor`; see `Identity`.
    """

    conversation: Conversation
    session: Session
    trajectory: int
    bank: Bank
    anchor: int | None = None

    def identity(self, role: str, chunk: int = 0) -> Identity:
        """Returns that of a generation of this session."""
        return Identity(self.conversation.id, self.trajectory, self.session.number, chunk, role,
                        self.anchor)


@dataclasses.dataclass(frozen=True)
class SessionRun:
    """A session that was read.

    Attributes:
      start: where it began.
      bank: the bank after it; what an unfinished session did until its end is kept.
      chats: by role, with all its steps.
      finished: whether every reply ended of itself.
      counts: operations by outcome ("bank/..."), replies by end ("end/..."), what could not be
        read by reason ("unread/...").
    """

    start: Start
    bank: Bank
    chats: Mapping[str, Chat]
    finished: bool
    counts: Counter


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One way through a conversation, session by session."""

    conversation: Conversation
    runs: tuple[SessionRun, ...]

    @property
    def bank(self) -> Bank:
        """The terminal bank."""
        return self.runs[-1].bank


def run_sessions(starts: Sequence[Start], agents: Mapping[str, Agent], retriever: Retriever,
                 prompts: Mapping[str, str], config: EpisodeConfig) -> list[SessionRun]:
    """Reads all sessions together, chunk by chunk: extractor, then manager, each in its own chat.

    A reply that is cut off, too long to ask for, or failed ends its session there: the operations
    of that chunk are not carried out. A chunk without turns is asked about too.

    Args:
      starts: sessions and banks; independent of each other.
      agents: who speaks, by role.
      retriever: finds what a manager reads.
      prompts: instructions by role.
      config: how sessions are cut, and the roles.
    """
    readings = [_Reading(start, prompts, config) for start in starts]
    for chunk in range(config.num_chunks):
        for role in config.roles:
            open_ = [reading for reading in readings if reading.finished]
            asks = [reading.ask(role, chunk, retriever) for reading in open_]
            if asks:
                for reading, spoken in zip(open_, agents[role].reply(asks), strict=True):
                    reading.take(role, spoken)
    return [reading.run() for reading in readings]


class _Reading:
    """A session while it is read."""

    def __init__(self, start: Start, prompts, config: EpisodeConfig):
        self._start, self._bank = start, start.bank
        self._chunks = start.session.chunks(config.num_chunks)
        self._chats = {role: Chat.opening(prompts[role]) for role in config.roles}
        self._facts: tuple = ()
        self._counts: Counter[str] = Counter()
        self.finished = True

    def ask(self, role: str, chunk: int, retriever: Retriever) -> Ask:
        """Returns what a role is asked next."""
        session, turns = self._start.session, self._chunks[chunk]
        if role == "extract":
            text = extractor_text(session, turns, chunk)
        elif role == "manage":
            memories, related = retriever.for_facts(
                self._bank, [(fact.speaker, fact.text) for fact in self._facts])
            text = manager_text(memories, self._facts, related, chunk)
        else:
            memories, _ = retriever.for_facts(self._bank, [_spoken_by(turn) for turn in turns])
            text = merged_text(session, turns, memories, chunk)
        return Ask(self._start.identity(role, chunk), self._chats[role], text)

    def take(self, role: str, spoken):
        """Takes a role's reply: facts for the manager, or operations on the bank."""
        self._chats[role] = spoken.chat
        self._counts[f"end/{spoken.end}"] += 1
        self.finished = spoken.end == "stop"
        if not self.finished:
            return
        read = parse_facts if role == "extract" else parse_operations
        parsed: Parsed = read(spoken.text, self._start.conversation.speakers)
        self._counts.update(f"unread/{problem}" for problem in parsed.problems)
        if role == "extract":
            self._facts = parsed.items
            return
        self._bank, outcomes = self._bank.apply(
            parsed.items, session=self._start.session.number, time=self._start.session.time)
        self._counts.update({f"bank/{name}": count for name, count in outcomes.items()})

    def run(self) -> SessionRun:
        """Returns the session as it was read."""
        return SessionRun(self._start, self._bank, self._chats, self.finished, self._counts)


def _spoken_by(turn: Turn) -> tuple[str, str]:
    return turn.speaker, turn.shown


def run_trajectories(conversations: Sequence[Conversation], agents: Mapping[str, Agent],
                     retriever: Retriever, prompts: Mapping[str, str],
                     config: EpisodeConfig) -> list[list[Trajectory]]:
    """Reads every conversation `num_trajectories` times, from empty banks, all side by side.

    The trajectories of a conversation name their entries alike, so that banks that hold the same
    are the same.

    Returns:
      `[conversations][trajectories]`.
    """
    runs = {(c, g): [] for c in range(len(conversations)) for g in range(config.num_trajectories)}
    banks = {(c, g): Bank(conversations[c].speakers, seed=conversations[c].id) for c, g in runs}
    for place in range(max(len(conversation.sessions) for conversation in conversations)):
        reading = [(c, g) for c, g in runs if place < len(conversations[c].sessions)]
        starts = [Start(conversations[c], conversations[c].sessions[place], g, banks[c, g])
                  for c, g in reading]
        for key, run in zip(reading, run_sessions(starts, agents, retriever, prompts, config)):
            runs[key].append(run)
            banks[key] = run.bank
    return [[Trajectory(conversation, tuple(runs[c, g])) for g in range(config.num_trajectories)]
            for c, conversation in enumerate(conversations)]


def choose_rerolls(episodes: Sequence[Sequence[Trajectory]], config: EpisodeConfig,
                   *seed: str | int) -> list[Start]:
    """Draws the sessions to reroll, and for each the trajectory whose bank it starts from.

    One draw a place in the conversations decides for all of them; the trajectory is uniform. The
    bank is that before the session: a reference, shared by the session's rerolls.

    Returns:
      `num_rerolls` starts for each chosen session of each conversation that has it.
    """
    rng = random.Random("/".join(map(str, seed)))
    starts = []
    for place in range(max((len(e[0].runs) for e in episodes), default=0)):
        chosen = rng.random() < config.local_fraction
        for trajectories in episodes:
            anchor = rng.randrange(len(trajectories))
            if chosen and place < len(trajectories[anchor].runs):
                start = trajectories[anchor].runs[place].start
                starts += [dataclasses.replace(start, trajectory=member, anchor=anchor)
                           for member in range(config.num_rerolls)]
    return starts
