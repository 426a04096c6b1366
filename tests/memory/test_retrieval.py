"""Which entries are found, by hand-made vectors; what an encoder may not do."""

import numpy as np
import pytest

from memcalib_jax.memory.bank import Bank, Insert
from memcalib_jax.memory.retrieval import (
    CachedEncoder, EmbeddingError, Retriever, SearchConfig, WordEncoder, best_matches)


class Angles:
    """Takes a text's last word as an angle in degrees, and counts what it is asked."""

    def __init__(self):
        self.asked = []

    def embed(self, texts):
        self.asked += texts
        angles = np.deg2rad([float(text.split()[-1]) for text in texts])
        return 7 * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def bank_of(*rows):
    bank = Bank(("Ann", "Ben"))
    for session, speaker, angle in rows:
        bank, _ = bank.apply([Insert(speaker, f"{speaker} {session} {angle}", "D1:1")],
                             session=session, time="")
    return bank


def contents(entries):
    return [entry.content for entry in entries]


def test_best_matches_by_hand():
    similarities = np.array([[0.9, 0.2, 0.9, 0.3], [0.1, 0.2, 0.0, -1.0]])
    allowed = np.array([[True, True, True, True], [False, True, True, True]])
    places = best_matches(similarities, allowed, top_k=3, threshold=0.2)
    assert [list(row) for row in places] == [[0, 2, 3], [1]]


def test_questions_find_each_speakers_best():
    bank = bank_of((3, "Ann", 10), (1, "Ann", 40), (3, "Ann", 5), (2, "Ben", 80), (1, "Ben", 0),
                   (1, "Ann", 60))
    found, = Retriever(Angles(), SearchConfig(top_k=3)).for_questions(bank, ["0"])
    # cos 40 = .77, cos 60 = .5 is the fourth; cos 80 = .17 is under the threshold of 0.3.
    assert contents(found["Ann"]) == ["Ann 1 40", "Ann 3 5", "Ann 3 10"]
    assert contents(found["Ben"]) == ["Ben 1 0"]
    loose, = Retriever(Angles(), SearchConfig(threshold=0.1)).for_questions(bank, ["0"])
    assert contents(loose["Ben"]) == ["Ben 1 0", "Ben 2 80"]


def test_facts_find_entries_of_their_own_speaker():
    bank = bank_of((1, "Ann", 0), (1, "Ann", 30), (1, "Ann", 60), (1, "Ben", 0), (1, "Ann", 179))
    retriever = Retriever(Angles(), SearchConfig(fact_top_k=2, most_candidates=3))
    entries, found = retriever.for_facts(bank, [("Ann", "1"), ("Ben", "10"), ("Ann", "59")])
    assert contents(entries) == ["Ann 1 0", "Ann 1 60", "Ben 1 0"]
    names = {entry.id: entry.content for entry in entries}
    assert [[names[id] for id in ids] for ids in found] == [["Ann 1 0"], ["Ben 1 0"], ["Ann 1 60"]]


def test_nothing_to_find():
    retriever = Retriever(Angles())
    empty = Bank(("Ann", "Ben"))
    assert retriever.for_questions(empty, ["0"]) == [{"Ann": [], "Ben": []}]
    assert retriever.for_facts(empty, [("Ann", "0")]) == ([], [[]])
    assert retriever.for_facts(bank_of((1, "Ann", 0)), []) == ([], [])


def test_a_text_is_embedded_once():
    encoder = Angles()
    retriever = Retriever(encoder)
    bank = bank_of((1, "Ann", 0), (1, "Ben", 1))
    first = retriever.for_questions(bank, ["0", "0"])
    assert retriever.for_questions(bank, ["0"])[0] == first[1]
    assert len(encoder.asked) == len(set(encoder.asked)) == 3


def test_the_cache_forgets_the_oldest():
    encoder = Angles()
    cached = CachedEncoder(encoder, most_texts=2)
    for texts in (["0", "90"], ["0", "45"], ["90"]):
        vectors = cached.embed(texts)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    assert encoder.asked == ["0", "90", "45", "90"]


def test_shared_words_are_similar():
    vectors = CachedEncoder(WordEncoder()).embed(
        ["Bram's cat, Gasket", "bram s CAT gasket", "walnut bread", "?!"])
    cosines = vectors @ vectors.T
    assert cosines[0, 1] == pytest.approx(1)
    assert cosines[0, 2] == 0 and not cosines[3].any()


@pytest.mark.parametrize("answers, message", [
    ([np.ones((1, 3)), np.ones((1, 4))], "have 4 dimensions now and had 3 before"),
    ([np.ones((2, 3))], r"array of shape \[2, 3\] of 1 texts"), ([np.ones(3)], r"shape \[3\]"),
    ([np.full((1, 3), np.nan)], "not finite")])
def test_an_encoder_that_fails(answers, message):
    class Scripted:
        def embed(self, texts):
            return answers.pop(0)

    cached = CachedEncoder(Scripted())
    with pytest.raises(EmbeddingError, match=message):
        for text in "ab":
            cached.embed([text])


@pytest.mark.parametrize("settings, message", [
    ({"top_k": 0}, "top_k must be at least 1"), ({"threshold": 1.5}, r"threshold must lie in")])
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        SearchConfig(**settings)
