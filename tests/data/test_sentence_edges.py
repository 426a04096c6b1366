"""Responses with the cuts that a reader would make, marked by a broken bar."""

import pathlib
import random

import pytest

from memcalib_jax.data.sentence_edges import Edge, find_edges, sentence_spans

MARK = "¦"
RESPONSES = (pathlib.Path(__file__).parent / "segmented_responses.txt").read_text().split("====\n")


def marked(text):
    return MARK.join(text[start:end] for start, end in sentence_spans(text))


def test_there_are_sixty():
    assert len(RESPONSES) >= 60


@pytest.mark.parametrize("response", RESPONSES, ids=lambda text: text[:20].split("\n")[0])
def test_cuts_of_a_reader(response):
    assert marked(response.replace(MARK, "")) == response


@pytest.mark.parametrize("text, spans", [
    ("", []), ("   ", [(0, 3)]), ("a", [(0, 1)]), ("\n\n", [(0, 2)]), ("🎉", [(0, 1)]),
    ("Rest.\r\n\r\nWalk.", [(0, 9), (9, 14)]), ("One two.\rThree four.", [(0, 9), (9, 20)])])
def test_spans(text, spans):
    assert sentence_spans(text) == spans


def test_edges_rank_what_is_no_sentence():
    #       0         1         2         3
    #       0123456789012345678901234567890123456
    text = "Rest now; then walk, as `a; b` says\nok"
    assert find_edges(text) == {
        5: Edge.WORD, 10: Edge.CLAUSE, 15: Edge.WORD, 21: Edge.CLAUSE, 24: Edge.WORD,
        31: Edge.WORD, 36: Edge.LINE}


@pytest.mark.parametrize("text, place, edge", [
    ("- a\n- b", 4, Edge.SENTENCE),
    ("1. a\n2. b", 5, Edge.FIXED),
    ("- a\n\n  b", 5, Edge.FIXED),
    ("a\n\nb", 3, Edge.SENTENCE),
    ("a\n```\nb\n```\nc", 2, Edge.FIXED),
    ("a\n```\nb\n```\nc", 12, Edge.FIXED),
    ("a\n```\nb\n```\nc", 6, Edge.LINE),
    ("|a|\n|-|\n|b|\n\nc", 8, Edge.FIXED),
    ("|a|\n|-|\n|b|\n\nc", 13, Edge.FIXED),
    ("|a|\n|-|\n|b|\n\nc", 4, Edge.LINE)])
def test_only_some_edges_are_never_crossed(text, place, edge):
    assert find_edges(text)[place] == edge


def test_any_text_is_covered_in_order():
    random.seed(0)
    parts = [*"ab.!?… \n\t\"'()[]*_`#>|-+:;,1234。！？“”", "\n\n", "```", "| a |", "|-|", "- ", "1. ",
             "\r\n", "    ", "**", "http://x.y", "\0", "\u2028", "$$", "é", "用户", "<a>", "[x]: y"]
    for _ in range(1000):
        text = "".join(random.choices(parts, k=random.randrange(60)))
        spans = sentence_spans(text)
        assert "".join(text[start:end] for start, end in spans) == text
        assert all(start < end for start, end in spans)
        assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
