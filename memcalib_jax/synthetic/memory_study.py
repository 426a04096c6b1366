"""LoGo-GRPO against GRPO in the memory game: who is blamed for a failure, and what is learned.

A policy of nine numbers, a logit for each context and action, is trained by the library's own
advantages and loss. GRPO is LoGo-GRPO without rerolls.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from memcalib_jax.credit.logo import logo_advantages, logo_loss
from memcalib_jax.synthetic.memory_game import (
    ACTIONS, CONTEXTS, Game, Move, draw_game, failures, global_rewards, is_right, local_reward,
    play, play_session)


@dataclasses.dataclass(frozen=True)
class StudyConfig:
    """What a run does.

    Attributes:
      games: games of a step, each played anew.
      trajectories: plays of a game that are compared, G.
      local_fraction: share of the sessions that are rerolled; 0: GRPO.
      rerolls: of one session from one bank.
      num_steps, epochs: steps, and updates on each.
      learning_rate: of Adam.
      test_games: fresh games of an evaluation.
    """

    games: int = 2
    trajectories: int = 16
    local_fraction: float = 0.5
    rerolls: int = 4
    num_steps: int = 60
    epochs: int = 2
    learning_rate: float = 0.1
    test_games: int = 64


@dataclasses.dataclass(frozen=True)
class Row:
    """One session played once: a step of the policy.

    Attributes:
      group: whom it is compared with.
      move: what was done.
      reward: what came of it.
      caused: how many questions fail by it.
      others: how many of these ask what only other sessions told.
      session: game and session number.
      local: whether it is a reroll.
    """

    group: int
    move: Move
    reward: float
    caused: int
    others: int
    session: tuple[int, int]
    local: bool


def collect(logits: np.ndarray, games: list[Game], config: StudyConfig,
            random: np.random.Generator) -> list[Row]:
    """Plays the games, rerolls some of their sessions, and rewards both."""
    choose = _sampler(logits, random)
    rows, groups = [], itertools.count()
    for number, game in enumerate(games):
        sessions = range(1, len(game.sessions) + 1)
        plays = [play(game, choose) for _ in range(config.trajectories)]
        group_of = {session: next(groups) for session in sessions}
        for played in plays:
            caused = failures(game, played.banks, game.questions())
            for session, reward in zip(sessions, global_rewards(game, played.banks[-1])):
                rows.append(Row(group_of[session], played.moves[session - 1], reward,
                                *_count(game, caused, session), (number, session), False))
        for session in sessions:
            if random.random() >= config.local_fraction:
                continue
            before = plays[random.integers(len(plays))].banks[:session]
            group = next(groups)
            for _ in range(config.rerolls):
                move, bank = play_session(game, session, before[-1], choose)
                caused = failures(game, (*before, bank), game.questions(session))
                rows.append(Row(group, move, local_reward(game, bank, session),
                                *_count(game, caused, session), (number, session), True))
    return rows


def _count(game, caused, session):
    things = [thing for thing, cause in caused.items() if cause == session]
    return len(things), sum(session not in game.told[thing] for thing in things)


def _sampler(logits, random):
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    bounds = np.cumsum(probabilities / probabilities.sum(axis=1, keepdims=True), axis=1)
    return lambda context: min(int(np.searchsorted(bounds[context], random.random(), "right")),
                               len(ACTIONS) - 1)


def advantages_of(rows: list[Row], size: int) -> np.ndarray:
    """Returns the rows' advantages; `size` is what the rows are padded to, for one program."""
    rewards, groups, valid = np.zeros(size), np.zeros(size, int), np.arange(size) < len(rows)
    rewards[:len(rows)] = [row.reward for row in rows]
    groups[:len(rows)] = [row.group for row in rows]
    values = _advantages(rewards, groups, valid, size)
    return np.asarray(values)[:len(rows)]


_advantages = jax.jit(lambda rewards, groups, valid, count: logo_advantages(
    rewards, groups, valid, num_groups=count), static_argnums=3)


@dataclasses.dataclass(frozen=True)
class SignCounts:
    """How often sessions that caused a failure got a negative advantage.

    `rows` counts rows that caused one, `sessions` sessions of a step in which at least one row
    did, where the blame is the sum of advantage times failures caused over all its rows.
    """

    rows: int = 0
    right_rows: int = 0
    sessions: int = 0
    right_sessions: int = 0

    def __add__(self, other: "SignCounts") -> "SignCounts":
        return SignCounts(*(a + b for a, b in zip(dataclasses.astuple(self),
                                                  dataclasses.astuple(other))))

    @property
    def row_rate(self) -> float:
        """Share of the failing rows with a negative advantage."""
        return self.right_rows / max(self.rows, 1)

    @property
    def session_rate(self) -> float:
        """Share of the failing sessions whose failures are blamed in sum."""
        return self.right_sessions / max(self.sessions, 1)


def sign_counts(rows: list[Row], advantages: np.ndarray, *, of_others: bool) -> SignCounts:
    """Counts the right signs among rows and sessions that caused failures.

    With `of_others`, only failures of what other sessions told.
    """
    counts = np.array([row.others if of_others else row.caused for row in rows])
    blame = {}
    for row, count, advantage in zip(rows, counts, advantages, strict=True):
        if count:
            blame[row.session] = blame.get(row.session, 0.0) + advantage * count
    failing = advantages[counts > 0]
    return SignCounts(len(failing), int((failing < 0).sum()), len(blame),
                      sum(bool(value < 0) for value in blame.values()))


def compare_signs(num_steps: int, config: StudyConfig, seed: int, *,
                  of_others: bool) -> dict[str, SignCounts]:
    """Counts right signs on the same plays of the even policy, in the sessions that were rerolled.

    "grpo" has their global rows, "local" their rerolls, "logo" both.
    """
    logits = np.zeros((len(CONTEXTS), len(ACTIONS)))
    random = np.random.default_rng(seed)
    totals = dict.fromkeys(("grpo", "local", "logo"), SignCounts())
    for _ in range(num_steps):
        games = [draw_game(random) for _ in range(config.games)]
        rows = collect(logits, games, config, random)
        rerolled = {row.session for row in rows if row.local}
        advantages = advantages_of(rows, _most_rows(config, games))
        taken = {"grpo": [not row.local and row.session in rerolled for row in rows],
                 "local": [row.local for row in rows],
                 "logo": [row.session in rerolled for row in rows]}
        for name, mask in taken.items():
            totals[name] += sign_counts(list(itertools.compress(rows, mask)),
                                        advantages[np.array(mask)], of_others=of_others)
    return totals


def train(config: StudyConfig, seed: int) -> list[float]:
    """Trains from the even policy; returns the share of right answers before and after each step.

    That is on fresh games, the same for every run of a seed.
    """
    random = np.random.default_rng([seed, 0])
    tests = [draw_game(np.random.default_rng([seed, 1, n])) for n in range(config.test_games)]
    logits = jnp.zeros((len(CONTEXTS), len(ACTIONS)))
    optimizer = optax.adam(config.learning_rate)
    moments = optimizer.init(logits)
    shares = [share_of_right(np.asarray(logits), tests)]
    for _ in range(config.num_steps):
        games = [draw_game(random) for _ in range(config.games)]
        rows = collect(np.asarray(logits, np.float64), games, config, random)
        size = _most_rows(config, games)
        advantages = np.zeros(size)
        advantages[:len(rows)] = advantages_of(rows, size)
        moves = np.zeros((2, size, len(games[0].sessions[0])), int)
        moves[:, :len(rows)] = np.moveaxis(
            [(row.move.contexts, row.move.actions) for row in rows], 1, 0)
        mask = np.broadcast_to((np.arange(size) < len(rows))[:, None], moves[0].shape)
        old = _log_probs(logits, *moves)
        for _ in range(config.epochs):
            logits, moments = _update(logits, moments, old, moves, advantages, mask, optimizer)
        shares.append(share_of_right(np.asarray(logits), tests))
    return shares


def _most_rows(config, games):
    return sum(len(game.sessions) for game in games) * (config.trajectories + config.rerolls)


def share_of_right(logits: np.ndarray, games: list[Game]) -> float:
    """Plays each game once, with the same random numbers for every policy.

    Returns the share of right answers at the end.
    """
    choose = _sampler(logits, np.random.default_rng(0))
    right = []
    for game in games:
        last = play(game, choose).banks[-1]
        right += [is_right(game, last, question.index, len(game.sessions))
                  for question in game.questions()]
    return float(np.mean(right))


def _log_probs(logits, contexts, actions):
    return jax.nn.log_softmax(logits)[contexts, actions]


@functools.partial(jax.jit, static_argnames=("optimizer",))
def _update(logits, moments, old, moves, advantages, mask, optimizer):
    def loss(logits):
        total, count = logo_loss(_log_probs(logits, *moves), old, old, advantages, mask, kl=0.0)
        return total / count

    changes, moments = optimizer.update(jax.grad(loss)(logits), moments)
    return optax.apply_updates(logits, changes), moments
