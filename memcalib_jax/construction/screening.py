"""Stage 1, source screening: deterministic filters, then a model's reading (B.1)."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from datasketch import MinHash, MinHashLSH
from py3langid.langid import classify

from memcalib_jax.construction.decisions import Asker, Rejected, text_of, truth_of
from memcalib_jax.construction.sources import FIELDS, SourceRow
from memcalib_jax.data.records import DOMAINS

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]+`", re.DOTALL)
# What a scraper leaves behind. HTML's own names only: <string> and <T> are somebody's code.
_MARKUP = re.compile(
    r"</?(?:a|b|blockquote|br|center|div|em|font|h[1-6]|hr|i|iframe|img|li|ol|p|pre|script|span|"
    r"strong|style|sub|sup|table|tbody|td|th|tr|u|ul)(?:\s[^<>]*)?/?>"
    r"|&(?:[a-z]{2,8}|#\d{2,5});|\[/?(?:quote|img|url|edit|reply|b|i|code)\b[^\]]*\]"
    r"|\{\{[^{}]*\}\}",
    re.IGNORECASE)
_NO_TEXT = re.compile(r"[\ufffd\u2580-\u259f\x00-\x08\x0b\x0c\x0e-\x1f]")
_PERMUTATIONS = 128
_LANGUAGE_WORDS = 12  # Fewer tell a classifier little.


@dataclass(frozen=True)
class ScreeningLimits:
    """Bounds of the deterministic filters.

    Attributes:
      min_words, max_words: of context and question together.
      min_answer_words, max_answer_words: of the reference answer.
      max_markup: most tags, entities and the like per 100 words of all texts.
      max_unreadable: largest share of characters that are no text.
      near_duplicate: share of word pairs in common from which on two samples are nearly the same.
    """

    min_words: int = 20
    max_words: int = 1500
    min_answer_words: int = 10
    max_answer_words: int = 1500
    max_markup: float = 3.0
    max_unreadable: float = 0.005
    near_duplicate: float = 0.6


@dataclass
class Duplicates:
    """Remembers samples, to find later ones that say the same.

    Candidates come from datasketch's locality-sensitive hashing; the share that decides is exact.
    """

    threshold: float
    _by_text: dict[str, str] = field(default_factory=dict)
    _pairs: dict[str, np.ndarray] = field(default_factory=dict)
    _index: MinHashLSH = field(init=False)

    def __post_init__(self):
        # Asking for less than the threshold finds nearly all that are at it.
        self._index = MinHashLSH(threshold=0.75 * self.threshold, num_perm=_PERMUTATIONS)

    def find(self, sample: Mapping[str, str]) -> tuple[str, str] | None:
        """Returns the kind of duplicate and the id of its twin; remembers any other sample."""
        words = [word.casefold() for word in _WORD.findall(_all_text(sample))]
        text = " ".join(words)
        if text in self._by_text:
            return "exact_duplicate", self._by_text[text]
        pairs = {f"{first} {second}".encode() for first, second in zip(words, words[1:])}
        sketch = MinHash(num_perm=_PERMUTATIONS)
        sketch.update_batch(sorted(pairs))
        hashed = np.array([_hash(pair) for pair in pairs], np.uint64)
        for twin in sorted(self._index.query(sketch)):
            other = self._pairs[twin]
            both = np.intersect1d(hashed, other, assume_unique=True).size
            if both >= self.threshold * (hashed.size + other.size - both):
                return "near_duplicate", twin
        self._by_text[text] = sample["id"]
        self._pairs[sample["id"]] = hashed
        self._index.insert(sample["id"], sketch)
        return None


def _hash(pair: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest())


def admit(
    rows: Iterable[SourceRow], limits: ScreeningLimits = ScreeningLimits()
) -> Iterator[tuple[SourceRow, Rejected | None]]:
    """Passes every row through the deterministic filters, in order; of twins the first stays.

    Reasons, in the order in which they are looked for: malformed_row (and what a format says of
    itself), missing_id, missing_source, unknown_domain, empty_question, empty_answer, duplicate_id,
    too_short, absurd_length, noisy_markup, unreadable_text, non_english, exact_duplicate,
    near_duplicate (its detail is the twin's id).
    """
    seen: dict[str, str] = {}
    duplicates = Duplicates(limits.near_duplicate)
    for row in rows:
        try:
            if row.problem:
                raise Rejected(*row.problem)
            check_fields(row.sample)
            if row.sample["id"] in seen:
                raise Rejected("duplicate_id", f"is the id of {seen[row.sample['id']]} too")
            check_text(row.sample, limits)
            twin = duplicates.find(row.sample)
            if twin:
                raise Rejected(*twin)
        except Rejected as rejected:
            yield row, rejected
        else:
            seen[row.sample["id"]] = row.place
            yield row, None


def check_fields(sample: Mapping[str, str]) -> None:
    """Refuses a sample that lacks what every sample has.

    Raises:
      Rejected: names what is missing.
    """
    for name, reason in (("id", "missing_id"), ("source", "missing_source"),
                         ("question", "empty_question"), ("reference_answer", "empty_answer")):
        if not (sample.get(name) or "").strip():
            raise Rejected(reason, f"{name} is missing or empty")
    if sample.get("domain") not in DOMAINS:
        raise Rejected("unknown_domain", f"{sample.get('domain')!r} is none of "
                                         f"{', '.join(DOMAINS)}")


def check_text(sample: Mapping[str, str], limits: ScreeningLimits) -> None:
    """Refuses texts that are too short, too long, noisy, or not English.

    Raises:
      Rejected: says which.
    """
    asked = len(_WORD.findall(f"{sample['context']} {sample['question']}"))
    answered = len(_WORD.findall(sample["reference_answer"]))
    for count, least, most, what in (
            (asked, limits.min_words, limits.max_words, "context and question"),
            (answered, limits.min_answer_words, limits.max_answer_words, "the answer")):
        if count < least:
            raise Rejected("too_short", f"{what}: {count} words, of {least} at least")
        if count > most:
            raise Rejected("absurd_length", f"{what}: {count} words, of {most} at most")
    prose = _CODE.sub(" ", _all_text(sample))
    marks = len(_MARKUP.findall(prose))
    if marks * 100 > limits.max_markup * (asked + answered):
        raise Rejected("noisy_markup", f"{marks} tags or entities in {asked + answered} words")
    unreadable = len(_NO_TEXT.findall(prose))
    if unreadable > limits.max_unreadable * len(prose):
        raise Rejected("unreadable_text", f"{unreadable} of {len(prose)} characters are no text")
    for name in ("context", "question", "reference_answer"):
        check_english(_CODE.sub(" ", sample[name]), name)


def check_english(text: str, name: str) -> None:
    """Refuses a text of another language; a short one, or one of code, passes.

    Raises:
      Rejected: names the language.
    """
    words = _WORD.findall(text)
    if len(words) < _LANGUAGE_WORDS or _is_code(text):
        return
    language, _ = classify(" ".join(words))
    if language != "en":
        raise Rejected("non_english", f"{name} looks like {language!r}")


def _is_code(text: str) -> bool:
    marks = sum(text.count(mark) for mark in "{}()[];=<>_")
    return marks > 0.03 * len(text)


def _all_text(sample: Mapping[str, str]) -> str:
    return " ".join(sample[name] for name in ("context", "question", "reference_answer"))


async def screen(sample: dict, ask: Asker) -> dict:
    """Asks whether question and answer fit, and whether the question tells anything to remember.

    Raises:
      Rejected: incoherent_pair, no_extractable_context, or a bad reply.
    """
    verdict = await ask("screen", {name: sample[name] for name in FIELDS[3:]}, read_verdict)
    for key, reason in (("coherent", "incoherent_pair"), ("extractable", "no_extractable_context")):
        if not verdict[key]:
            raise Rejected(reason, verdict["reason"])
    return {"screening": verdict}


def read_verdict(reply: dict) -> dict:
    """Reads `coherent`, `extractable` and `reason` of a reply."""
    return {"coherent": truth_of(reply, "coherent"), "extractable": truth_of(reply, "extractable"),
            "reason": text_of(reply, "reason")}
