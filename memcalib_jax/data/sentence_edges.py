"""Where a Markdown text may be cut into sentences, and how strongly each place asks for it."""

import enum
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import markdown_it


class Edge(enum.IntEnum):
    """How a place in a text separates what stands before and after it, strongest first.

    FIXED and SENTENCE begin a sentence; a sentence that is too short is joined to its neighbour
    over a SENTENCE, never over a FIXED. The others are where a long sentence is better cut than
    inside a word.
    """

    FIXED = 0
    SENTENCE = 1
    LINE = 2
    CLAUSE = 3
    WORD = 4
    INSIDE = 5


# Blocks with text of their own. Of them, those of which no sentence crosses an end.
_LEAVES = {"heading_open", "paragraph_open", "fence", "code_block", "html_block", "hr", "tr_open"}
_CODE = {"fence", "code_block"}
_CLOSED = _CODE | {"tr_open"}
_INTRODUCES_NEXT = {"heading_open", "hr"}

_LINE_BREAK = re.compile(r"\r\n?|\n")
_CLAUSE_END = re.compile(r"[;:,–—]\s+|[，、；：]")
_WORD_START = re.compile(r"(?<=\s)\S")
# A cut inside these would leave two halves that say nothing.
_INLINE = re.compile(
    r"(`+)(?:(?!\1).)+\1|\$\$.+?\$\$|\[[^\[\]\n]*\]\([^()\n]*\)|<[^<>\s]+>|https?://\S+"
    r"|\*\*[^*\n]{1,60}\*\*", re.DOTALL)
_FIELD = re.compile(r"^[*_]{0,3}[^\W\d_][\w '/-]{0,30}[*_]{0,3}:[*_]{0,3}[ \t]+\S", re.MULTILINE)
_LABEL = re.compile(r"(?:[-+*>] |\d{1,3}[.)] )*(?:\*\*[^*]+\*\*|.*[:：][*_]*)")
_LONGEST_LABEL = 14  # words

_CLOSERS = "\"'”’»)\\]*_」』）"
# Where a script ends sentences without a space, and points of suspension: unknown to spaCy's rules.
_OTHER_END = re.compile(rf"[。！？｡]+[{_CLOSERS}]*|(?:\.{{3,}}|…)[{_CLOSERS}]*(?=\s)")
_UNSPACED_END = re.compile(rf"[。！？｡][{_CLOSERS}]*$")
_OPENER = re.compile(r"(?<=\s)[\"'“‘«(\[*_「『（]+$")
_NO_END = re.compile(
    r"\b(?:approx|cf|dept|eq|fig|incl|sec|st|vol|vs)\.$"  # whatever follows
    r"|(?:^|[:;,])[\W_]{0,8}\d{1,3}\.$",  # the number of an item
    re.IGNORECASE)
# spaCy takes quadratic time over what has no spaces, and learns nothing about sentences from it.
_LONG_RUN = re.compile(r"(?<!\S)\S{100,}(?=\S)")
_NO_END_BEFORE_NUMBER = re.compile(r"\b(?:ch|nos?|pp?)\.$", re.IGNORECASE)
_NO_END_BEFORE_LOWER = re.compile(rf"(?:\betc\.|\.{{3}}|…|[.!?。！？][{_CLOSERS}]+)$")


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Cuts a Markdown text into sentences, before any bound on their length.

    Blocks come from CommonMark with tables, sentence ends from spaCy's rules (no model is used)
    and a few of this file. A heading, a rule, a paragraph all in bold and a short label that ends
    in a colon go with what they introduce; every list item and table row starts a sentence; a code
    block is one sentence; what holds no letter or digit goes with the sentence before it.

    Returns:
      (start, end) of each, in characters; they cover the text in order. Empty for an empty text.
    """
    starts = [place for place, edge in sorted(find_edges(text).items()) if edge <= Edge.SENTENCE]
    return [span for span in zip([0, *starts], [*starts, len(text)]) if span[0] < span[1]]


def find_edges(text: str) -> dict[int, Edge]:
    """Finds the places in (0, len(text)) where a text may be cut.

    Returns:
      For each, in characters, how strongly; every other place is INSIDE.
    """
    edges = {match.start(): Edge.WORD for match in _WORD_START.finditer(text)}
    edges |= {match.end(): Edge.CLAUSE for match in _CLAUSE_END.finditer(text)}
    edges |= {match.end(): Edge.LINE for match in _LINE_BREAK.finditer(text)}
    starts = {}
    introducing = None  # the block before, if it goes with the next one
    closed = False
    nlp = _sentencizer()
    with nlp.memory_zone():  # else every new word of every response stays in memory
        for block in _blocks(text):
            if block.kind in _CODE or introducing is None or not block.follows(introducing):
                starts[block.start] = Edge.FIXED if closed else block.edge
            introducing = block if block.kind in _INTRODUCES_NEXT else None
            closed = block.kind in _CLOSED
            if block.kind == "paragraph_open":
                content = text[block.start:block.end]
                if _is_label(content):
                    introducing = block
                inside = {place for match in _INLINE.finditer(content)
                          for place in range(match.start() + 1, match.end())}
                for place in inside:
                    edges.pop(block.start + place, None)
                starts |= {block.start + place: Edge.SENTENCE
                           for place in _sentence_starts(nlp, content, inside)}
    edges |= starts
    _join_decorations(text, edges)
    return {place: edge for place, edge in edges.items() if 0 < place < len(text)}


@dataclass(frozen=True)
class _Block:
    """A block that holds text.

    `edge` is what its kind and place make of its start; `depth` counts the lists around it;
    `starts_item` says whether it is the first of a list item.
    """

    kind: str
    start: int
    end: int
    edge: Edge
    depth: int
    starts_item: bool

    def follows(self, introduction: "_Block") -> bool:
        """Says whether it is what the block before introduces, not the item or text after it."""
        return (self.depth > introduction.depth
                or self.depth == introduction.depth and not self.starts_item)


def _blocks(text: str) -> Iterator[_Block]:
    lines = [0, *(match.end() for match in _LINE_BREAK.finditer(text)), len(text)]
    ordered: list[bool] = []  # of the lists around, innermost last
    starts_item = False
    for token in _markdown().parse(text):
        if token.type.endswith("_list_open"):
            ordered.append(token.type == "ordered_list_open")
        elif token.type.endswith("_list_close"):
            ordered.pop()
        elif token.type == "list_item_open":
            starts_item = True
        elif token.type in _LEAVES:
            first, after = (min(line, len(lines) - 1) for line in token.map)
            in_item = ordered and (ordered[-1] or not starts_item)
            edge = Edge.FIXED if in_item or token.type in _CLOSED else Edge.SENTENCE
            yield _Block(token.type, lines[first], lines[after], edge, len(ordered), starts_item)
            starts_item = False


def _sentence_starts(nlp, paragraph: str, inside: set[int]) -> list[int]:
    """Finds where sentences but the first start in a paragraph; never at a place of `inside`."""
    words = _LONG_RUN.sub(lambda run: len(run[0]) * "x", paragraph)
    places = {sentence.start_char for sentence in nlp(words).sents}
    places |= {match.end() for match in _OTHER_END.finditer(paragraph)}
    fields = [match.start() for match in _FIELD.finditer(paragraph)]
    kept = set(fields) if len(fields) > 1 else set()
    last = 0
    for place in sorted(places):
        while place < len(paragraph) and paragraph[place].isspace():
            place += 1
        opener = _OPENER.search(paragraph[:place])
        if opener:
            place = opener.start()
        if place not in inside and _ends(paragraph[last:place], paragraph[place:place + 3]):
            kept.add(place)
            last = place
    return sorted(kept - {0})


def _ends(sentence: str, following: str) -> bool:
    """Says whether a sentence ends before the text that follows it."""
    words = sentence.strip()
    if not words or not following:
        return False
    if sentence.endswith(words) and not _UNSPACED_END.search(words):
        return False
    after = following.lstrip(_CLOSERS.replace("\\", "") + "“‘«([「『（")[:1]
    return not (
        _NO_END.search(words)
        or after.isdigit() and _NO_END_BEFORE_NUMBER.search(words)
        or after.islower() and _NO_END_BEFORE_LOWER.search(words))


def _is_label(paragraph: str) -> bool:
    """Says whether a paragraph does nothing but introduce the next block."""
    words = paragraph.split()
    return len(words) <= _LONGEST_LABEL and bool(_LABEL.fullmatch(" ".join(words)))


def _join_decorations(text: str, edges: dict[int, Edge]):
    """Takes away what would make a sentence of text without a letter or digit."""
    starts = sorted(place for place, edge in edges.items()
                    if edge <= Edge.SENTENCE and 0 < place < len(text))
    bare = [not any(map(str.isalnum, text[start:end]))
            for start, end in zip([0, *starts], [*starts, len(text)])]
    for place, before, after in zip(starts, bare, bare[1:]):
        first = before and place == starts[0]
        if (after or first) and edges[place] == Edge.SENTENCE:
            edges[place] = Edge.LINE


@functools.cache
def _markdown():
    # Blocks only. Without headings by underline ("text\n---" is meant as a rule in chat) and
    # without link definitions, which would be no block.
    markdown = markdown_it.MarkdownIt("commonmark").enable("table")
    markdown.disable(["lheading", "reference"])
    markdown.core.ruler.enableOnly(["normalize", "block"])
    return markdown


@functools.cache
def _sentencizer():
    import spacy  # here, since it takes two seconds that only sentence granularity needs

    nlp = spacy.blank("en")
    nlp.add_pipe("sentencizer")
    nlp.max_length = 2**31
    return nlp
