"""Which words got a channel's credit, where it is known which word shows which memory."""

from collections.abc import Iterable

import numpy as np

from memcalib_jax.credit import CHANNELS
from memcalib_jax.evaluation.trace import Trace
from memcalib_jax.synthetic.vocabulary import DEFAULTS

SUPPORT = ("AB-", "AC-", "B+", "BC-", "C+")
"""Channels that look for tokens their atoms support: theirs are the atoms' own values."""
UNDER_USE = ("BA-", "CA-", "CB-")
KINDS = ("own", "right", "wrong", "default", "stop", "other")
"""Tokens by what they show: the channel's own atoms, an atom rightly used, another one wrongly
used, a topic's default word, the response's end, or nothing."""


def credited(trace: Trace) -> dict[str, dict[str, float]]:
    """Sums up where the moved credit of a step went.

    A pair's credit is its scores q over their sum, so that each pair counts the same.

    Returns:
      For each channel with localized pairs: `pairs` (their number), for each of `KINDS` the sum of
      its shares, and `hits`, the pairs whose most credited token is an own value.
    """
    found: dict[str, dict[str, float]] = {}
    for pair in np.flatnonzero(trace.localized_S):
        response = int(trace.pair_response_S[pair])
        channel = int(trace.pair_channel_S[pair])
        kinds = kinds_of(trace, response, channel)
        score = trace.score_of(pair)
        sums = found.setdefault(
            CHANNELS[channel], {"pairs": 0.0, "hits": 0.0} | dict.fromkeys(KINDS, 0.0))
        sums["pairs"] += 1
        sums["hits"] += kinds[int(np.argmax(score))] == "own"
        for kind, share in zip(kinds, score / score.sum()):
            sums[kind] += float(share)
    return found


def kinds_of(trace: Trace, response: int, channel: int) -> list[str]:
    """Returns the kind of each token of a response, as the channel sees it."""
    record = trace.records[trace.record_R[response]]
    own = {_value(atom) for atom in trace.atoms_of(response, channel)}
    levels = [(_value(atom), atom["ideal"] == level) for atom, level in zip(
        record["atoms"], trace.actual_R_A[response])]
    right = {value for value, is_right in levels if is_right}
    defaults = {word for pair in DEFAULTS[record["question"]] for word in pair}
    kinds = ["own" if word in own else "right" if word in right
             else "wrong" if word in dict(levels) else "default" if word in defaults else "other"
             for word in map(str.strip, trace.token_texts(response))]
    if trace.responses[response]["finish_reason"] == "stop":
        kinds[-1] = "stop"
    return kinds


def _value(atom: dict) -> str:
    return atom["text"].split()[1]


def shares(steps: Iterable[dict[str, dict[str, float]]], channels: tuple[str, ...],
           kind: str) -> float:
    """Returns the share of a kind, or of `hits`, in percent over all pairs of the channels.

    NaN where there is no pair.
    """
    chosen = [step[name] for step in steps for name in channels if name in step]
    pairs = sum(sums["pairs"] for sums in chosen)
    return 100.0 * sum(sums[kind] for sums in chosen) / pairs if pairs else float("nan")
