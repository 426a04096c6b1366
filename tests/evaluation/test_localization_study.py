import collections
import csv
import dataclasses
import io

import numpy as np
import pytest
from made_traces import traced

from memcalib_jax.evaluation import localization_figures
from memcalib_jax.evaluation.localization_study import (
    LABEL_COLUMN,
    LABELS,
    SUPPORT,
    UNDER_USE,
    LabelledPair,
    Pair,
    Sentence,
    bootstrap_interval,
    draw,
    figures,
    is_hit,
    pair_of,
    read_sheet,
    shares,
    sheet,
    study,
    table,
)

IRRELEVANT, PARTIAL, KEY = range(3)


def made(channel, *sentences, labels=()):
    """A pair of (tokens, credit) sentences with their labels."""
    pair = Pair(3, "r/1", channel, "=question?", ("- memory one", "memory two"), tuple(
        Sentence(f"{place} sentence.", tokens, credit)
        for place, (tokens, credit) in enumerate(sentences)))
    return LabelledPair(pair, tuple(labels))


FIRST = made(8, (10, 0.1), (30, 0.6), (10, 0.3), labels=(IRRELEVANT, KEY, PARTIAL))
SECOND = made(7, (5, 0.5), (5, 0.5), labels=(IRRELEVANT, IRRELEVANT))


def test_shares_by_hand():
    tokens, credit = shares(FIRST)
    np.testing.assert_allclose(tokens, [0.2, 0.2, 0.6])
    np.testing.assert_allclose(credit, [0.1, 0.3, 0.6])


def test_pairs_weigh_equally():
    found = figures([FIRST, SECOND], seed=0)
    assert found["tokens"]["Irrelevant"]["mean"] == pytest.approx(60)  # not 20 of 60 tokens
    assert found["credit"]["Key"]["mean"] == pytest.approx(30)
    assert (found["pairs"], found["top3_hits"], found["top3_hit_rate"]) == (2, 1, 50.0)
    # Two pairs resampled: both the first, both the second, or one of each.
    assert found["credit"]["Key"]["interval"] == [0.0, 60.0]
    alone = figures([FIRST], seed=0)
    assert alone["credit"]["Key"]["interval"] == pytest.approx([60.0, 60.0])


@pytest.mark.parametrize("credits, labels, hit", [
    ((0.4, 0.3, 0.2, 0.1), (0, 0, 0, KEY), False), ((0.4, 0.3, 0.2, 0.1), (0, 0, PARTIAL, 0), True),
    ((0.1, 0.2, 0.3, 0.4), (KEY, 0, 0, 0), False), ((0.1, 0.2, 0.3, 0.4), (0, 0, 0, KEY), True),
    ((1.0, 0.0, 0.0, 0.0), (0, KEY, 0, 0), False), ((0.25,) * 4, (0, 0, 0, KEY), False),
    ((0.25,) * 4, (0, 0, KEY, 0), True)])
def test_top_three_hits(credits, labels, hit):
    assert is_hit(made(1, *[(4, credit) for credit in credits], labels=labels)) is hit


def test_the_bootstrap_against_resampling_one_by_one():
    values = np.random.default_rng(1).random((12, 2)) ** 2
    found = bootstrap_interval(values, seed=0)
    rng = np.random.default_rng(5)
    means = [values[rng.integers(0, 12, 12)].mean(axis=0) for _ in range(10_000)]
    np.testing.assert_allclose(found, np.percentile(means, [2.5, 97.5], axis=0), atol=0.01)
    assert (bootstrap_interval(values, seed=0) == found).all()
    assert (bootstrap_interval(values, seed=1) != found).any()


def test_the_draw():
    candidates = [(step, response, channel) for step in range(5) for response in range(9)
                  for channel in range(1, 9) if channel != 3 or response < 1]
    chosen = draw(candidates, 20, seed=0)
    counts = collections.Counter(channel for _, _, channel in chosen)
    assert counts == {channel: 20 for channel in range(1, 9)} | {3: 5}
    assert len(set(chosen)) == len(chosen) == 145 and set(chosen) <= set(candidates)
    assert len({channel for _, _, channel in chosen[:20]}) > 4
    assert draw(candidates[::-1], 20, seed=0) == chosen != draw(candidates, 20, seed=1)
    without = [one for one in candidates if one[2] != 4]
    assert [one for one in draw(without, 20, seed=0) if one[2] == 5] != [] and set(
        draw(without, 20, seed=0)) == {one for one in chosen if one[2] != 4}


def test_a_pairs_credit_is_its_share_of_q():
    trace = traced()
    ids = np.concatenate([np.arange(n) // 7 for n in trace.length_R]).astype(np.int32)
    trace = dataclasses.replace(trace, sentence_N=ids)
    for pair in np.flatnonzero(trace.localized_S):
        response, channel = trace.pair_response_S[pair], trace.pair_channel_S[pair]
        found = pair_of(trace, response, channel)
        sign = -1 if channel in UNDER_USE else 1
        q = np.maximum(np.clip(sign * trace.difference_of(pair), -3, 3)
                       - trace.thresholds_C[channel], 0)
        for place, sentence in enumerate(found.sentences):
            inside = slice(7 * place, 7 * place + 7)
            assert sentence.tokens == len(q[inside])
            assert sentence.credit == pytest.approx(q[inside].sum() / q.sum(), abs=1e-6)
        assert "".join(one.text for one in found.sentences) == trace.responses[response]["text"]
        assert found.memories and found.step == 4 and found.response == trace.name(response)


def filled(pairs, labels):
    """The sheet with these labels in its second column, by row."""
    rows = list(csv.DictReader(io.StringIO(sheet(pairs))))
    for row, label in zip(rows, labels, strict=True):
        row[LABEL_COLUMN] = label
    return rows


def written(rows, columns=None):
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or rows[0], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return "\ufeff" + text.getvalue()


PAIRS = [FIRST.pair, SECOND.pair]


def test_the_sheet_and_back():
    rows = filled(PAIRS, ["Key", " partial", "I", "irrelevant", "K"])
    assert [row["row"] for row in rows] == ["1-1", "1-2", "1-3", "2-1", "2-2"]
    assert rows[0]["question"] == "'=question?"
    assert rows[0]["memories"].startswith("'- memory one\n")
    assert "directly uses these memories" in rows[0]["rule"]
    assert "goes against what these memories forbid" in rows[3]["rule"]
    assert not any("0.6" in value or "credit" in value for value in rows[1].values())
    shuffled = [rows[place] for place in (4, 0, 2, 1, 3)]
    found = read_sheet(written(shuffled), PAIRS)
    assert [one.labels for one in found] == [(KEY, PARTIAL, IRRELEVANT), (IRRELEVANT, KEY)]
    assert [one.pair for one in found] == PAIRS


@pytest.mark.parametrize("change, message", [
    (lambda rows: rows[:3], "2 rows missing: 2-1, 2-2"),
    (lambda rows: rows + rows[1:2], "row 1-2 twice"),
    (lambda rows: rows + [rows[0] | {"row": "3-1"}], "1 rows that the key does not have: 3-1"),
    (lambda rows: rows[:4] + [rows[4] | {LABEL_COLUMN: ""}], "1 rows without a label: 2-2"),
    (lambda rows: rows[:4] + [rows[4] | {LABEL_COLUMN: "Main"}],
     "label that is none of Irrelevant, Partial, Key: 2-2")])
def test_sheets_that_cannot_be_used(change, message):
    rows = filled(PAIRS, ["Key"] * 5)
    with pytest.raises(ValueError, match=message):
        read_sheet(written(change(rows)), PAIRS)


def test_a_sheet_without_its_columns():
    with pytest.raises(ValueError, match="the sheet has no column 'label "):
        read_sheet(written(filled(PAIRS, ["Key"] * 5), ["row"]), PAIRS)


def test_groups_of_the_study_and_its_table():
    results = study([FIRST, SECOND], seed=0)
    assert list(results) == ["all", "support", "under-use", "C+", "CB-"]
    assert results["C+"] == results["support"] == figures([FIRST], seed=0)
    lines = table(results).splitlines()
    assert lines[1].split() == ["all", "2", "60.0", "10.0", "30.0", "55.0", "15.0", "30.0", "1",
                                "(50.0%)"]
    assert set(SUPPORT) | set(UNDER_USE) == set(range(1, 9)) and len(LABELS) == 3


def test_pictures():
    assert localization_figures.share_picture(study([FIRST, SECOND], seed=0))[:4] == b"\x89PNG"
    odd = made(8, (3, 1.0), (2, 0.0), labels=(KEY, IRRELEVANT))
    odd = LabelledPair(dataclasses.replace(odd.pair, question="$x_", sentences=(
        Sentence("a" * 500 + " $y^\n\n```\n  code", 3, 1.0), Sentence("", 2, 0.0))), odd.labels)
    for labelled in (FIRST, odd):
        assert localization_figures.case_picture(labelled, 7)[:4] == b"\x89PNG"


def test_words_of_a_case_stay_inside_and_in_order():
    words, height = localization_figures._flow(
        [[("one two " * 40, "k", None, 9.5, "normal")], [("x" * 300, "k", None, 9.5, "bold")]], 9.0)
    assert "".join(word[3] for word in words if "x" in word[3]) == "x" * 300
    assert [word[3].strip() for word in words if "x" not in word[3]][:4] == [
        "one", "two", "one", "two"]
    assert all(0.3 < x and x + long <= 9.0 - 0.35 + 1e-6 for x, _, long, *_ in words)
    lines = [y for _, y, *_ in words]
    assert lines == sorted(lines) and height > lines[-1]
