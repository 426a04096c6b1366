"""Retrieval of memories: cosines in one product, the best of each speaker above a threshold."""

import dataclasses
import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from memcalib_jax.api import BackgroundLoop
from memcalib_jax.api.embeddings import EmbeddingClient
from memcalib_jax.memory.bank import Bank, Entry

_WORD = re.compile(r"\w+")


class EmbeddingError(ValueError):
    """An encoder returned something other than one finite vector of its dimension a text."""


class Encoder(Protocol):
    """Makes vectors of texts, float32 [texts, dimension]; any length but 0 does."""

    def embed(self, texts: Sequence[str]) -> np.ndarray: ...


class WordEncoder:
    """Embeds a text as its words, hashed: needs no weights and finds shared words alone."""

    def __init__(self, dimension: int = 1024):
        self.dimension = dimension

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Returns float32 [texts, dimension]: how often words of each hash occur."""
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for vector, text in zip(vectors, texts):
            for word in _WORD.findall(text.lower()):
                digest = hashlib.blake2s(word.encode(), digest_size=8).digest()
                vector[int.from_bytes(digest, "little") % self.dimension] += 1.0
        return vectors


class EndpointEncoder:
    """Embeds by an endpoint. A text whose request failed becomes zeros, and is counted there."""

    def __init__(self, client: EmbeddingClient, loop: BackgroundLoop):
        self._client, self._loop = client, loop

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Returns float32 [texts, dimension].

        Raises:
          EmbeddingError: every request failed, or the vectors differ in their dimension.
        """
        vectors = self._loop.submit(self._client.embed(texts)).result()
        sizes = {vector.size for vector in vectors if vector is not None}
        if len(sizes) != 1:
            raise EmbeddingError(
                f"{self._client.settings.base_url} gave vectors of {sorted(sizes)} dimensions"
                if sizes else f"{self._client.settings.base_url} embedded none of {len(texts)} "
                "texts: check the endpoint, its model and key; the same command goes on")
        size, = sizes
        return np.stack([np.zeros(size, np.float32) if vector is None else vector
                         for vector in vectors])


class CachedEncoder:
    """Keeps the unit vectors of the texts last seen, and asks for each other text once.

    A text without any direction (a vector of zeros) is similar to nothing, and asked for again.
    """

    def __init__(self, encoder: Encoder, *, most_texts: int = 100_000):
        self._encoder, self._most = encoder, most_texts
        self._known: OrderedDict[str, np.ndarray] = OrderedDict()
        self._dimension: int | None = None

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Returns float32 [texts, dimension], rows of length 1 or 0.

        Raises:
          EmbeddingError: the encoder changed its dimension, or returned another number of
            vectors, or one that is not finite.
        """
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        fresh = {}
        if new:
            vectors = np.asarray(self._encoder.embed(new), np.float32)
            self._check(vectors, len(new))
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            fresh = dict(zip(new, vectors / np.where(lengths > 0, lengths, 1.0)))
        rows = [self._known[text] if text in self._known else fresh[text] for text in texts]
        self._known.update((text, vector) for text, vector in fresh.items() if vector.any())
        for text in texts:
            if text in self._known:
                self._known.move_to_end(text)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return np.stack(rows) if rows else np.zeros((0, self._dimension or 0), np.float32)

    def _check(self, vectors, count):
        if vectors.ndim != 2 or len(vectors) != count:
            raise EmbeddingError(f"the encoder made an array of shape {list(vectors.shape)} of "
                                 f"{count} texts")
        if self._dimension not in (None, vectors.shape[1]):
            raise EmbeddingError(
                f"the encoder's vectors have {vectors.shape[1]} dimensions now and had "
                f"{self._dimension} before: similarities between the two mean nothing. Use one "
                "model throughout, and begin the run anew with it")
        if not np.isfinite(vectors).all():
            raise EmbeddingError("the encoder returned a vector that is not finite")
        self._dimension = vectors.shape[1]


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """How memories are found.

    Attributes:
      top_k: most entries of a speaker for a question.
      threshold: least cosine for a question (the release: 0.1).
      fact_top_k, fact_threshold: the same for a new fact, among the entries of its speaker.
      most_candidates: most entries for the facts of a chunk together.
    """

    top_k: int = 30
    threshold: float = 0.3
    fact_top_k: int = 5
    fact_threshold: float = 0.1
    most_candidates: int = 25

    def __post_init__(self):
        for name in ("top_k", "fact_top_k", "most_candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("threshold", "fact_threshold"):
            if not -1.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [-1, 1], not {getattr(self, name)}")


def best_matches(similarities_Q_N: np.ndarray, allowed_Q_N: np.ndarray, *, top_k: int,
                 threshold: float) -> list[np.ndarray]:
    """Returns, for each query, the places of its most similar allowed entries, best first.

    Args:
      similarities_Q_N: float [queries, entries].
      allowed_Q_N: bool [queries, entries].
      top_k: most places of a query.
      threshold: least similarity. Of equal ones, the earlier entry comes first.
    """
    scores = np.where(allowed_Q_N & (similarities_Q_N >= threshold), similarities_Q_N, -np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    return [row[np.isfinite(scores[q, row])] for q, row in enumerate(order)]


class Retriever:
    """Finds the entries of a bank that a question or a new fact is about."""

    def __init__(self, encoder: Encoder, config: SearchConfig = SearchConfig()):
        self.config = config
        self._encoder = CachedEncoder(encoder)

    def for_questions(self, bank: Bank,
                      questions: Sequence[str]) -> list[dict[str, list[Entry]]]:
        """Returns, for each question, every speaker's entries above the threshold.

        They stand in the order in which an answer agent reads them: by session, the most similar
        first within one.
        """
        entries = list(bank.entries.values())
        similarities = self._similarities(questions, entries)
        found = [{} for _ in questions]
        for speaker in bank.speakers:
            of_speaker = np.array([entry.speaker == speaker for entry in entries], bool)
            places = best_matches(similarities, np.broadcast_to(of_speaker, similarities.shape),
                                  top_k=self.config.top_k, threshold=self.config.threshold)
            for answer, chosen in zip(found, places):
                answer[speaker] = sorted((entries[p] for p in chosen), key=lambda e: e.session)
        return found

    def for_facts(self, bank: Bank,
                  facts: Sequence[tuple[str, str]]) -> tuple[list[Entry], list[list[str]]]:
        """Returns the entries that facts, of (speaker, text), may be about.

        Where the facts of a chunk have more than `most_candidates` entries together, the most
        similar stay.

        Returns:
          The entries, best first, each once; and for each fact the ids of those that it found.
        """
        entries = list(bank.entries.values())
        similarities = self._similarities([text for _, text in facts], entries)
        allowed = np.array([[entry.speaker == speaker for entry in entries]
                            for speaker, _ in facts], bool).reshape(similarities.shape)
        places = best_matches(similarities, allowed, top_k=self.config.fact_top_k,
                              threshold=self.config.fact_threshold)
        best: Mapping[int, float] = {}
        for fact, chosen in enumerate(places):
            for place in chosen:
                best[place] = max(best.get(place, -1.0), similarities[fact, place])
        kept = sorted(best, key=lambda place: (-best[place], place))[:self.config.most_candidates]
        return [entries[place] for place in kept], [
            [entries[place].id for place in chosen if place in kept] for chosen in places]

    def _similarities(self, texts, entries):
        """Returns the cosines, float32 [texts, entries]."""
        if not texts or not entries:
            return np.zeros((len(texts), len(entries)), np.float32)
        vectors = self._encoder.embed([*texts, *(entry.content for entry in entries)])
        return vectors[:len(texts)] @ vectors[len(texts):].T
