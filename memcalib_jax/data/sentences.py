"""Which sentence of a response each of its tokens belongs to (H.2, arXiv 2609.24259)."""

from collections.abc import Mapping, Sequence

import numpy as np

from memcalib_jax.data.sentence_edges import Edge, find_edges

MIN_TOKENS, MAX_TOKENS = 4, 96
"""Bounds of a sentence's length."""

_BYTES_OF_A_CHARACTER = 4


def sentence_ids(
    tokenizer,
    tokens: Sequence[int],
    *,
    min_tokens: int = MIN_TOKENS,
    max_tokens: int = MAX_TOKENS,
) -> np.ndarray:
    """Assigns every token of a response to exactly one sentence, in order.

    Args:
      tokenizer: that of the model.
      tokens: the response's token ids, stop token included; anything a sampler can draw.
      min_tokens, max_tokens: see `sentence_ids_of_text`.

    Returns:
      int32 [T], from 0 in steps of 0 or 1: a row of `sentence_ids_P_G_T` of `memcalib_advantages`,
      where what stands behind a response's end may be 0.
    """
    return sentence_ids_of_text(
        *token_ends(tokenizer, tokens), min_tokens=min_tokens, max_tokens=max_tokens)


def sentence_ids_of_text(
    text: str,
    ends: Sequence[int],
    *,
    min_tokens: int = MIN_TOKENS,
    max_tokens: int = MAX_TOKENS,
) -> np.ndarray:
    """Assigns every token of a text to exactly one sentence, in order; needs no tokenizer.

    Args:
      text: the decoded response.
      ends: where each token ends in it, see `token_ends`.
      min_tokens: a shorter sentence joins its right neighbour, else its left one, unless an end
        that is never crossed (of a code block, a table row, an ordered item, or a paragraph
        inside an item) or `max_tokens` forbids it.
      max_tokens: a longer one is cut at lines, else clauses, else words, else tokens.

    Returns:
      int32 [T], from 0 in steps of 0 or 1.

    Raises:
      ValueError: `max_tokens` is less than twice `min_tokens`, or `min_tokens` less than 1.
    """
    if not 1 <= min_tokens <= max_tokens / 2:
        raise ValueError("min_tokens must be at least 1 and at most half of max_tokens, got "
                         f"{min_tokens} and {max_tokens}")
    edges = token_edges(text, ends, find_edges(text))
    starts = [0, *(np.flatnonzero(edges[1:] <= Edge.SENTENCE) + 1), len(edges)]
    starts = _cut_long(starts, edges, min_tokens, max_tokens)
    starts = _join_short(starts, edges, min_tokens, max_tokens)
    return np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))


def token_ends(tokenizer, tokens: Sequence[int]) -> tuple[str, list[int]]:
    """Decodes tokens and finds where in the text each one ends.

    A token's text need not encode to it again. The text is that of `decode` without special
    tokens; a special token is empty, and so are all but the first of the tokens that share one
    character. Ends never decrease, and the last is the text's.
    """
    def decode(ids):
        return tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    tokens = [int(token) for token in tokens]
    text = decode(tokens)
    pieces = [decode([token]) for token in tokens]
    if "".join(pieces) == text:
        return text, np.cumsum([len(piece) for piece in pieces], dtype=int).tolist()
    # A piece may read differently beside its neighbours (a space dropped in front, bytes of one
    # character): decode each behind what came just before it.
    ends, end = [], 0
    context = 0
    for place in range(len(tokens)):
        read = len(ends)  # tokens before it are done with
        before, now = decode(tokens[context:read]), decode(tokens[context:place + 1])
        if now.endswith("\ufffd") and place + 1 - read < _BYTES_OF_A_CHARACTER:
            continue  # the character may go on
        end = min(end + max(len(now) - len(before), 0), len(text))
        ends += [end] * (place + 1 - read)
        context = read
    ends += [len(text)] * (len(tokens) - len(ends))
    ends[-1:] = [len(text)][:len(ends)]
    return text, ends


def token_edges(text: str, ends: Sequence[int], edges: Mapping[int, Edge]) -> np.ndarray:
    """Finds the strongest edge between each token and the one before it.

    A token begins at its first character that is no white space: " The" is cut off whole by an
    edge before "The", while the line breaks of a paragraph's end stay with it. A token without
    text belongs to the one before.

    Args:
      text: the decoded response.
      ends: where each token ends in it, never decreasing.
      edges: places in the text, see `find_edges`.

    Returns:
      int [T], members of `Edge`; at 0 that of the text's start, which is INSIDE.
    """
    found = np.full(len(ends), Edge.INSIDE, int)
    places = sorted(edges)
    start = next_place = home = 0
    for token, end in enumerate(ends):
        piece = text[start:end]
        if piece:
            home = start + (len(piece) - len(piece.lstrip()) if piece.strip() else 0)
        while next_place < len(places) and places[next_place] <= home:
            found[token] = min(found[token], edges[places[next_place]])
            next_place += 1
        start = end
    return found


def _cut_long(starts, edges, min_tokens, max_tokens):
    """Cuts sentences of more than `max_tokens` at the strongest edge in reach, the last of equals.

    Reach is from half of `max_tokens`, and leaves `min_tokens`, so that no piece is short.
    """
    cut = []
    for start, end in zip(starts, starts[1:]):
        cut.append(start)
        while end - start > max_tokens:
            last = min(start + max_tokens, end - min_tokens)
            reach = np.arange(last, start + max_tokens // 2 - 1, -1)
            start = int(reach[np.argmin(edges[reach])])
            cut.append(start)
    return [*cut, starts[-1]]


def _join_short(starts, edges, min_tokens, max_tokens):
    """Joins sentences of fewer than `min_tokens` to the right, else to the left, where allowed."""
    def may_join(before, edge, after):
        return (0 < edge < len(edges) and edges[edge] > Edge.FIXED
                and after - before <= max_tokens)

    starts, index = list(starts), 0
    while index + 1 < len(starts):
        start, end = starts[index], starts[index + 1]
        if end - start >= min_tokens:
            index += 1
        elif index + 2 < len(starts) and may_join(start, end, starts[index + 2]):
            del starts[index + 1]
        elif index and may_join(starts[index - 1], start, end):
            del starts[index]
        else:
            index += 1
    return starts
