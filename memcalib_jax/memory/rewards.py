"""What answers and banks are worth: Memory-R2, 3.3, A.1 and C.2. Pure functions of plain values."""

import dataclasses
import hashlib
import math
import random
import re
import string
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from memcalib_jax.memory.conversations import Question

OVERLAPS = ("multiset", "set")
UNFINISHED = ("both", "local")

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Constants of the rewards.

    Attributes:
      overlap: how repeated tokens count in F1: "multiset" (SQuAD) or "set" (the release).
      allowance: the share of the conversation's words that a bank may hold for nothing.
      compression: weight of the penalty, lambda.
      unfinished: on which paths an unfinished session is worth 0: "both", or "local" rerolls
        only (the release).
      terminal_questions, local_questions: most questions to a terminal and to a rerolled bank.
    """

    overlap: str = "multiset"
    allowance: float = 0.7
    compression: float = 0.3
    unfinished: str = "both"
    terminal_questions: int = 64
    local_questions: int = 16

    def __post_init__(self):
        for name, allowed in (("overlap", OVERLAPS), ("unfinished", UNFINISHED)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not "
                                 f"{getattr(self, name)!r}")
        for name in ("allowance", "compression"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a number of at least 0, not "
                                 f"{getattr(self, name)}")
        for name in ("terminal_questions", "local_questions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


def answer_tokens(text: str) -> list[str]:
    """Splits an answer as SQuAD does: lower case, without punctuation and articles."""
    return _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def token_f1(answer: str, gold: str, *, overlap: str = "multiset") -> float:
    """Returns the F1 of an answer's tokens, in [0, 1], A.1.

    Precision and recall divide the overlap by the numbers of tokens. It counts each token as often
    as both have it ("multiset"), or once ("set"). Two empty answers agree.
    """
    if overlap not in OVERLAPS:
        raise ValueError(f"overlap must be one of {', '.join(OVERLAPS)}, not {overlap!r}")
    ours, theirs = answer_tokens(answer), answer_tokens(gold)
    if not ours or not theirs:
        return float(ours == theirs)
    count = Counter if overlap == "multiset" else set
    shared = count(ours) & count(theirs)
    common = shared.total() if overlap == "multiset" else len(shared)
    return 2 * common / (len(ours) + len(theirs))


def bleu_1(answer: str, gold: str) -> float:
    """Returns clipped unigram precision times the brevity penalty, in [0, 1].

    The tokens are those of `token_f1`. Two empty answers agree.
    """
    ours, theirs = answer_tokens(answer), answer_tokens(gold)
    if not ours or not theirs:
        return float(ours == theirs)
    precision = (Counter(ours) & Counter(theirs)).total() / len(ours)
    return precision * math.exp(min(0.0, 1 - len(theirs) / len(ours)))


def excess_ratio(memory_words: int, conversation_words: int, *, allowance: float = 0.7) -> float:
    """Returns the words of a bank beyond its allowance, as a share of the conversation's words."""
    if not conversation_words:
        return 0.0
    return max(0.0, memory_words / conversation_words - allowance)


def bank_reward(f1s: Sequence[float], excess: float, config: RewardConfig = RewardConfig()) -> float:
    """Returns R(M, Q): the mean F1, 0 without questions, minus the compression penalty."""
    mean = sum(f1s) / len(f1s) if f1s else 0.0
    return mean - config.compression * excess


def session_rewards(f1s: Mapping[Question, float], sessions: Sequence[int], excess: float,
                    config: RewardConfig = RewardConfig(), *,
                    unfinished: Collection[int] = ()) -> dict[int, float]:
    """Attributes a terminal bank's answers to the sessions that their evidence lies in.

    A session's reward is that of the terminal bank over the questions with any evidence in it; a
    question with evidence in several counts in each, one without in the last.

    Args:
      f1s: of the questions asked.
      sessions: numbers of the sessions, in order.
      excess: of the terminal bank.
      config: constants.
      unfinished: sessions that ended early; 0 where `config.unfinished` is "both".
    """
    rewards = {}
    for session in sessions:
        own = [f1 for question, f1 in f1s.items()
               if session in (question.sessions or {sessions[-1]})]
        masked = config.unfinished == "both" and session in unfinished
        rewards[session] = 0.0 if masked else bank_reward(own, excess, config)
    return rewards


def choose_questions(questions: Sequence[Question], count: int, *seed: str | int) -> list[Question]:
    """Draws at most `count` questions, in their own order; equal seeds draw equal questions.

    The seed is spelled out and hashed, so that every process and run draws the same.
    """
    if len(questions) <= count:
        return list(questions)
    digest = hashlib.sha256("/".join(map(str, seed)).encode()).digest()
    kept = random.Random(digest).sample(range(len(questions)), count)
    return [questions[i] for i in sorted(kept)]


@dataclasses.dataclass(frozen=True)
class EvidenceCounts:
    """Pieces of gold evidence, summed over questions.

    Attributes:
      required: all of them.
      missing: those that no entry of the bank rests on.
      unretrieved: those that the bank has and no retrieved entry rests on.
    """

    required: int = 0
    missing: int = 0
    unretrieved: int = 0

    def __add__(self, other: "EvidenceCounts") -> "EvidenceCounts":
        return EvidenceCounts(self.required + other.required, self.missing + other.missing,
                              self.unretrieved + other.unretrieved)

    @property
    def memory_failure(self) -> float:
        """M-Fail (C.2), in [0, 1]; 0 where nothing is required."""
        return self.missing / max(self.required, 1)

    @property
    def retrieval_failure(self) -> float:
        """The share that is in the bank but was not retrieved."""
        return self.unretrieved / max(self.required, 1)


def evidence_counts(question: Question, bank_dia_ids: Collection[str],
                    retrieved_dia_ids: Iterable[str]) -> EvidenceCounts:
    """Counts a question's evidence that the bank lacks, and what it has but did not give.

    Turn ids are compared, not contents: tags alone can please this measure.
    """
    evidence = set(question.evidence)
    kept = evidence & set(bank_dia_ids)
    return EvidenceCounts(len(evidence), len(evidence) - len(kept),
                          len(kept - set(retrieved_dia_ids)))
