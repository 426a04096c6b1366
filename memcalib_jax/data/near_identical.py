"""Questions that are nearly the same, which must not stand on both sides of a split."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

# A run of letters and digits, but a character of its own where words are not set apart.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def near_identical(
    first: Sequence[str], second: Sequence[str], *, threshold: float = 0.9
) -> list[tuple[int, int, float]]:
    """Finds the pairs of texts whose sets of words share at least `threshold` of their union.

    Case, order, repetition and punctuation do not count. Every such pair is found (no sampling):
    two sets can only be that alike if they share one of their few rarest words.

    Returns:
      (index into `first`, index into `second`, share), by index; share is in [threshold, 1].

    Raises:
      ValueError: `threshold` is not in (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be in (0, 1], not {threshold}")
    words_first, words_second = ([_words(text) for text in texts] for texts in (first, second))
    counts = Counter(word for words in words_first + words_second for word in words)
    holders = defaultdict(list)
    for place, words in enumerate(words_second):
        for word in _rarest(words, counts, threshold):
            holders[word].append(place)
    pairs = []
    for place, words in enumerate(words_first):
        candidates = {other for word in _rarest(words, counts, threshold)
                      for other in holders.get(word, ())}
        for other in sorted(candidates):
            share = len(words & words_second[other]) / len(words | words_second[other])
            if share >= threshold:
                pairs.append((place, other, share))
    return pairs


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.casefold())) or frozenset([text.strip()])


def _rarest(words: frozenset[str], counts: Counter, threshold: float) -> list[str]:
    """Returns so many of the rarest words that a text without any of them differs too much.

    A text that is alike shares at least threshold * len(words) of them. The tolerance keeps
    rounding from asking for one word too many to be shared.
    """
    kept = len(words) - math.ceil(threshold * len(words) - 1e-9) + 1
    return sorted(words, key=lambda word: (counts[word], word))[:kept]
