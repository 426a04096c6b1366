"""The distinct token segments of prompts, their variants and the responses under each.

A tree has three levels: the full prompt as the spine; of every variant the rest after its
longest common prefix with the spine; and the responses under a prompt or variant. Sharing is
found on token ids, so it is exact whatever the template did to the text.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of tokens and what it sees before itself.

    Attributes:
      tokens: int32 `[n]`, n > 0.
      position: place of the first token in its own sequence.
      ancestors: (segment index in the tree, how many of its leading tokens are seen),
        outermost first.
    """

    tokens: np.ndarray
    position: int
    ancestors: tuple[tuple[int, int], ...]

    @property
    def context(self) -> int:
        """Number of ancestors' tokens that the segment sees."""
        return sum(length for _, length in self.ancestors)


@dataclasses.dataclass(frozen=True)
class Tree:
    """Segments, ancestors before descendants, and the response segment of each pair.

    Attributes:
      segments: the distinct segments.
      leaves: for each pair, in the order given, the index of its response's segment. Equal
        pairs share a leaf, unless they were to be kept.
      dense_tokens: tokens that scoring every pair as a row of its own would forward.
    """

    segments: tuple[Segment, ...]
    leaves: tuple[int, ...]
    dense_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens that the tree forwards."""
        return sum(len(segment.tokens) for segment in self.segments)


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Returns the number of leading ids that two id arrays share."""
    size = min(len(first), len(second))
    different = np.nonzero(first[:size] != second[:size])[0]
    return int(different[0]) if len(different) else size


def build_tree(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]],
               pairs: Sequence[tuple[int, int]], *,
               position_offsets: Sequence[int] | None = None,
               branch_multiple: int = 1, keep_repeats: bool = False) -> Tree:
    """Builds the tree of the pairs' distinct segments.

    Args:
      prompts: token ids; the first is the full prompt (the spine), the others its variants.
      responses: token ids.
      pairs: (prompt index, response index), in any order, repeats allowed.
      position_offsets: shift of each prompt's positions (0 by default). A shifted prompt
        shares nothing with others.
      branch_multiple: variants leave the spine at multiples of this many tokens, where the model
        has a state to fork. A repeated prompt is shared whole.
      keep_repeats: give equal pairs a response segment each, where what is done with their
        values differs, as a loss does.

    Raises:
      ValueError: an empty prompt or response, or an index out of range.
    """
    prompts = [np.asarray(prompt, np.int32) for prompt in prompts]
    responses = [np.asarray(response, np.int32) for response in responses]
    offsets = [0] * len(prompts) if position_offsets is None else list(position_offsets)
    _check(prompts, responses, pairs, offsets)

    segments: list[Segment] = []
    prompt_segments: dict = {}
    leaf_segments: dict = {}

    def add(segment: Segment) -> int:
        segments.append(segment)
        return len(segments) - 1

    def prompt_segment(index: int) -> int:
        key = (prompts[index].tobytes(), offsets[index])
        if key not in prompt_segments:
            prompt_segments[key] = add(branch(index))
        return prompt_segments[key]

    def branch(index: int) -> Segment:
        tokens = prompts[index]
        # The last token always stays with the variant: its hidden state predicts the response.
        shared = min(common_prefix(tokens, prompts[0]), len(tokens) - 1)
        shared -= shared % branch_multiple
        if index == 0 or offsets[index] != offsets[0] or shared == 0:
            return Segment(tokens, offsets[index], ())
        return Segment(tokens[shared:], offsets[0] + shared, ((prompt_segment(0), shared),))

    def leaf_segment(pair: int, prompt: int, response: int) -> int:
        parent = prompt_segment(prompt)
        key = (parent, pair if keep_repeats else responses[response].tobytes())
        if key not in leaf_segments:
            seen = (*segments[parent].ancestors, (parent, len(segments[parent].tokens)))
            leaf_segments[key] = add(Segment(
                responses[response], offsets[prompt] + len(prompts[prompt]), seen))
        return leaf_segments[key]

    leaves = tuple(leaf_segment(i, *pair) for i, pair in enumerate(pairs))
    dense = sum(len(prompts[p]) + len(responses[r]) for p, r in pairs)
    return Tree(tuple(segments), leaves, dense)


def _check(prompts, responses, pairs, offsets):
    for name, rows in (("prompt", prompts), ("response", responses)):
        for index, row in enumerate(rows):
            if row.ndim != 1 or not len(row):
                raise ValueError(f"{name} {index} must be a non-empty list of token ids")
    if len(offsets) != len(prompts):
        raise ValueError(f"{len(offsets)} position offsets for {len(prompts)} prompts")
    if any(offset < 0 for offset in offsets):
        raise ValueError("position offsets must not be negative")
    for prompt, response in pairs:
        if not (0 <= prompt < len(prompts) and 0 <= response < len(responses)):
            raise ValueError(
                f"pair ({prompt}, {response}) is out of range: {len(prompts)} prompts, "
                f"{len(responses)} responses")
