"""Reads use levels off the wording of a response: a stand-in for a judge model, and no real judge.

It makes programs, tests and demonstrations runnable without an endpoint. It sees that an atom's
own words turn up in a response, and where; it understands neither paraphrase nor negation, so its
levels are no measure of a model. Ideal levels, rubrics and actions are not among its inputs.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+|\n+")
_ENDINGS = (
    "iness ingly ness ment ings edly ing ies ied ers est ed er es ly s y e".split()
)
_NUMERALS = {
    word: str(number)
    for number, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen twenty".split()
    )
} | dict(thirty="30", forty="40", fifty="50", sixty="60", ninety="90", hundred="100")
# Function words, the verbs and time words of everyday advice, and the words for the people whom
# every memory is about: none of them tells one atom from another.
_STOP_WORDS = frozenset(
    """a about above after again against all almost also although always am an and another any
    are aren't around as at away be because been before being below best better between both but
    by came can can't cannot company could couldn't day days did didn't do does doesn't doing don't
    done down during each either else enough ever every few first for from further get gets give
    given go goes going good got great had has hasn't have haven't having he her here hers him his
    hour hours how however i if in instead into is isn't it its itself just keep keeps kind
    last least less let like little long look made make makes making many may maybe me might
    mine minute minutes month months more most much must my near need needs never new next no nor
    not now of off often on once one only onto or other others our ours out over own part per
    perhaps put quite rather really right said same say see seem shall she should since so some
    something soon still such take taken takes team teams than that the their theirs them
    themselves then there these they they're thing things this those though through time
    times to today together too toward towards try turn under until up upon us use used user users
    uses using usually very want was way we week weeks well were what when where whether which
    while who whom whose why will with within without won't work working works would year years
    yes yet you you're your yours yourself""".split()
)


@dataclass(frozen=True)
class LexicalRule:
    """Holds the constants of the rule, all shares in [0, 1] but the last.

    `used`: an atom is used when two adjacent sentences hold more than this share of its own
    words. `carried`: a sentence carries an atom when it holds at least this share. `early`: a
    used atom is Control when it is carried by a sentence whose middle lies in this part of the
    response; or, wherever they stand, by at least `repeats` sentences.
    """

    used: float = 1 / 3
    carried: float = 0.3
    early: float = 0.6
    repeats: int = 3


@dataclass(frozen=True)
class Footprint:
    """Tells an atom's level (0 Ignore, 1 Bound, 2 Control) and the sentence that shows it best."""

    level: int
    sentence: str


def lexical_levels(
    query: str,
    memory_texts: Sequence[str],
    atom_texts: Sequence[str],
    response: str,
    rule: LexicalRule = LexicalRule(),
) -> list[int]:
    """Reads the level of every atom (0 Ignore, 1 Bound, 2 Control), in the order of the atoms."""
    footprints = lexical_footprints(query, memory_texts, atom_texts, response, rule)
    return [footprint.level for footprint in footprints]


def lexical_footprints(
    query: str,
    memory_texts: Sequence[str],
    atom_texts: Sequence[str],
    response: str,
    rule: LexicalRule = LexicalRule(),
) -> list[Footprint]:
    """Reads the level of every atom and the sentence that shows it ("" for Ignore).

    A word of an atom weighs one over the number of atoms (or memory texts, if more) that have it,
    and nothing if the query has it. Total: any text gets an answer, an empty response all Ignore.
    """
    sentences = [text for text in _SENTENCE_END.split(response) if text.strip()]
    sentence_words = [_words(text) for text in sentences]
    atom_words = [_words(text) for text in atom_texts]
    in_atoms = Counter(word for words in atom_words for word in words)
    in_memory = Counter(word for text in memory_texts for word in _words(text))
    in_query = _words(query)
    footprints = []
    for words in atom_words:
        weights = {
            word: 1.0 / max(in_atoms[word], in_memory[word]) for word in sorted(words - in_query)
        }
        footprints.append(_footprint(weights, sentences, sentence_words, rule))
    return footprints


def _footprint(weights, sentences, sentence_words, rule):
    total = sum(weights.values())
    if not total or not sentences:
        return Footprint(0, "")

    def share(present):
        return sum(weight for word, weight in weights.items() if word in present) / total

    shares = [share(present) for present in sentence_words]
    neighbours = zip(sentence_words, sentence_words[1:] + [frozenset()])
    if max(share(here | following) for here, following in neighbours) <= rule.used:
        return Footprint(0, "")
    best = sentences[shares.index(max(shares))].strip()
    carrying = [place for place, value in enumerate(shares) if value >= rule.carried]
    early = bool(carrying) and (carrying[0] + 0.5) / len(sentences) < rule.early
    return Footprint(2 if early or len(carrying) >= rule.repeats else 1, best)


def _words(text: str) -> frozenset[str]:
    words = _WORD.findall(text.lower().replace("’", "'"))
    found = (word.removesuffix("'s") for word in words)
    return frozenset(_stem(word) for word in found if word not in _STOP_WORDS)


def _stem(word: str) -> str:
    """Cuts one ending, then a doubled or open last letter: coached, coaches -> coach."""
    word = word.replace("'", "")
    if word in _NUMERALS:
        return _NUMERALS[word]
    for ending in _ENDINGS:
        stays = len(word) - len(ending)
        if stays >= 3 and word.endswith(ending) and not (ending == "s" and word.endswith("ss")):
            word = word[:stays]
            break
    if len(word) > 3 and word[-1] == word[-2]:
        word = word[:-1]
    if len(word) > 3 and word[-1] in "eiy":
        word = word[:-1]
    return word
