"""Whether credit goes where a person sees a memory's influence (4.4 and I, arXiv 2609.24259)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memcalib_jax.credit import CHANNELS
from memcalib_jax.evaluation.trace import Trace
from memcalib_jax.sheets import cell, read_answers, to_csv

LABELS = ("Irrelevant", "Partial", "Key")
LABEL_COLUMN = f"label ({', '.join(LABELS)})"
SUPPORT, UNDER_USE = (1, 2, 4, 5, 8), (3, 6, 7)
"""Channels whose credit goes to supported, and to suppressed tokens."""

TOP = 3
RESAMPLES = 10_000

_RULES = {
    SUPPORT: "Key: the sentence directly uses these memories. Partial: their influence on it is "
             "indirect or mixed with something else. Irrelevant: nothing in it comes from them.",
    UNDER_USE: "Key: the sentence directly goes against what these memories forbid or exclude. "
               "Partial: it goes against it in part, or mixed with something else. Irrelevant: "
               "nothing in it goes against them.",
}
_SHEET = ("row", LABEL_COLUMN, "sentence", "pair", "number", "rule", "memories", "question")


@dataclass(frozen=True)
class Sentence:
    """A sentence of a response: its text, its tokens and its share of the channel's credit."""

    text: str
    tokens: int
    credit: float


@dataclass(frozen=True)
class Pair:
    """A (response, channel) pair whose credit was moved.

    Attributes:
      step, response: where it is, the response by name.
      channel: index into `CHANNELS`.
      question: of the record.
      memories: texts of the atoms that the channel holds.
      sentences: of the response, in order.
    """

    step: int
    response: str
    channel: int
    question: str
    memories: tuple[str, ...]
    sentences: tuple[Sentence, ...]


@dataclass(frozen=True)
class LabelledPair:
    """A pair with the annotator's label of each sentence, an index into `LABELS`."""

    pair: Pair
    labels: tuple[int, ...]


def draw(candidates: Sequence[tuple[int, int, int]], count: int, *,
         seed: int) -> list[tuple[int, int, int]]:
    """Draws `count` of each channel's pairs, or all where there are fewer.

    Args:
      candidates: (step, response, channel) of pairs whose credit was moved.
      count: pairs a channel.
      seed: of the draw; a channel's draw does not hang on the others.

    Returns:
      The drawn ones, in an order that mixes channels.
    """
    chosen = []
    for channel in (*SUPPORT, *UNDER_USE):
        own = sorted(one for one in candidates if one[2] == channel)
        order = np.random.default_rng([seed, channel]).permutation(len(own))
        chosen += [own[index] for index in order[:count]]
    return [chosen[index] for index in np.random.default_rng(seed).permutation(len(chosen))]


def pair_of(trace: Trace, response: int, channel: int) -> Pair:
    """Sums a pair's token scores q by sentence, as shares of the response's sum."""
    scores = trace.score_of(trace.pair_of(response, channel))
    ids = trace.sentences_of(response)
    credit, texts = scores / scores.sum(), trace.token_texts(response)
    sentences = []
    for number in np.unique(ids):
        inside = ids == number
        text = "".join(text for text, chosen in zip(texts, inside) if chosen)
        sentences.append(Sentence(text, int(inside.sum()), float(credit[inside].sum())))
    return Pair(trace.step, trace.name(response), channel,
                trace.records[trace.record_R[response]]["question"],
                tuple(atom["text"] for atom in trace.atoms_of(response, channel)),
                tuple(sentences))


def sheet(pairs: Sequence[Pair]) -> str:
    """Returns the annotator's sheet as CSV, a row a sentence; it does not show the credit."""
    rows = [_SHEET]
    for number, pair in enumerate(pairs, start=1):
        rule = next(rule for channels, rule in _RULES.items() if pair.channel in channels)
        for place, sentence in enumerate(pair.sentences, start=1):
            rows.append((_row(number, place), "", cell(sentence.text), number, place, rule,
                         cell("\n".join(pair.memories)), cell(pair.question)))
    return to_csv(rows)


def read_sheet(text: str, pairs: Sequence[Pair]) -> list[LabelledPair]:
    """Reads the filled sheet of these pairs back.

    Raises:
      ValueError: a row is missing, repeated, unknown or without one of `LABELS`; says which.
    """
    rows = [_row(number, place) for number, pair in enumerate(pairs, start=1)
            for place in range(1, len(pair.sentences) + 1)]
    answers = {name.lower(): index for index, name in enumerate(LABELS)} | {
        name[0].lower(): index for index, name in enumerate(LABELS)}
    found = iter(read_answers(text, LABEL_COLUMN, rows, answers, "label", LABELS).values())
    return [LabelledPair(pair, tuple(next(found) for _ in pair.sentences)) for pair in pairs]


def _row(number, place):
    return f"{number}-{place}"  # "number.place" would be a number to a spreadsheet


def shares(labelled: LabelledPair) -> tuple[np.ndarray, np.ndarray]:
    """Returns the shares of a pair's tokens and of its credit by label, float64 [3] each."""
    tokens = np.array([sentence.tokens for sentence in labelled.pair.sentences], np.float64)
    credit = np.array([sentence.credit for sentence in labelled.pair.sentences])
    count = len(LABELS)
    return (np.bincount(labelled.labels, tokens, count) / tokens.sum(),
            np.bincount(labelled.labels, credit, count) / credit.sum())


def is_hit(labelled: LabelledPair) -> bool:
    """Returns whether one of the three sentences with most credit is Partial or Key.

    A sentence without credit is not among them; of equals the earlier counts.
    """
    credit = np.array([sentence.credit for sentence in labelled.pair.sentences])
    best = np.argsort(-credit, kind="stable")[:TOP]
    return any(labelled.labels[place] > 0 for place in best if credit[place] > 0)


def figures(labelled: Sequence[LabelledPair], *, seed: int) -> dict:
    """Averages shares over pairs, each of equal weight, with 95% bootstrap intervals, in percent.

    Args:
      labelled: pairs, one or more.
      seed: of the resampling of pairs, with replacement.
    """
    values = np.array([np.concatenate(shares(one)) for one in labelled])
    hits = [is_hit(one) for one in labelled]
    means = 100 * values.mean(axis=0)
    low, high = 100 * bootstrap_interval(values, seed=seed)
    count = len(LABELS)
    return {"pairs": len(labelled), "top3_hits": sum(hits),
            "top3_hit_rate": 100.0 * sum(hits) / len(hits)} | {
        kind: {label: {"mean": float(means[place]),
                       "interval": [float(low[place]), float(high[place])]}
               for place, label in enumerate(LABELS, start=first)}
        for kind, first in (("tokens", 0), ("credit", count))}


def bootstrap_interval(values_N_K: np.ndarray, *, seed: int) -> np.ndarray:
    """Returns the 2.5th and 97.5th percentiles of the means of resampled rows, float64 [2, K]."""
    rng, count = np.random.default_rng(seed), len(values_N_K)
    # How often each row is drawn: one product gives every resample's mean.
    drawn = rng.multinomial(count, np.full(count, 1 / count), RESAMPLES)
    return np.percentile(drawn @ values_N_K / count, [2.5, 97.5], axis=0)


def study(labelled: Sequence[LabelledPair], *, seed: int) -> dict[str, dict]:
    """Returns `figures` of all pairs, of both groups of channels, and of each channel."""
    parts = {"all": (*SUPPORT, *UNDER_USE), "support": SUPPORT, "under-use": UNDER_USE} | {
        CHANNELS[channel]: (channel,) for channel in (*SUPPORT, *UNDER_USE)}
    chosen = {name: [one for one in labelled if one.pair.channel in channels]
              for name, channels in parts.items()}
    return {name: figures(some, seed=seed) for name, some in chosen.items() if some}


def table(results: dict[str, dict]) -> str:
    """Lays `study` out as plain text."""
    lines = [f"{'':10}{'pairs':>6}" + "".join(
        f"{label + ' ' + kind:>20}" for kind in ("tokens", "credit") for label in LABELS)
        + f"{'top-3 hits':>14}"]
    for name, found in results.items():
        lines.append(f"{name:10}{found['pairs']:>6}" + "".join(
            f"{found[kind][label]['mean']:>20.1f}" for kind in ("tokens", "credit")
            for label in LABELS)
            + f"{found['top3_hits']:>6} ({found['top3_hit_rate']:.1f}%)".rjust(14))
    return "\n".join(lines)
