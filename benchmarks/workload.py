"""Work shaped like MemCalib: prompts with 15 atoms in 5 blocks, groups of responses, channels.

Ideal levels have the benchmark's shares (Table 7, arXiv 2609.24259), actual levels those of the
cold start (Table 10). Tokens are stretches of the built-in sample's text: a model rounds on text as
it does at work, while random tokens drive it to log-probs that no run ever sees.
"""

import dataclasses
import functools

import numpy as np
from absl import flags

from memcalib_jax import credit
from memcalib_jax.data import sample_path
from memcalib_jax.data.sample import load_responses
from memcalib_jax.models import default_model_path, load_tokenizer
from memcalib_jax.scoring import ScoringGroup

IDEAL_SHARES = (0.843, 0.081, 0.076)
ACTUAL_SHARES = ((0.9666, 0.0221, 0.0113), (0.3489, 0.6292, 0.0219), (0.1616, 0.0960, 0.7424))
HEAD_SHARE, TAIL_SHARE = 0.2, 0.1  # system text before the memories, the question after them


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a workload; the responses of all groups have `response_tokens`, or a spread."""

    groups: int = 2
    group_size: int = 8
    atoms: int = 15
    prompt_tokens: int = 384
    response_tokens: int = 128


def define_size_flags():
    """Defines the flags of a benchmark on groups of responses: sizes, bins and repeats."""
    flags.DEFINE_integer("groups", 2, "Prompts.")
    flags.DEFINE_integer("group_size", 8, "Responses of a prompt.")
    flags.DEFINE_integer("prompt_tokens", 384, "Tokens of a prompt.")
    flags.DEFINE_integer("response_tokens", 128, "Tokens of a response.")
    flags.DEFINE_integer("bin_tokens", 8192, "About the most tokens of a packed device call.")
    flags.DEFINE_integer("repeats", 3, "Counted runs.")


@functools.cache
def _text() -> np.ndarray:
    tokenizer = load_tokenizer(default_model_path())
    return np.concatenate([tokenizer.encode(response.text, add_special_tokens=False)
                           for response in load_responses(sample_path("responses.jsonl"))])


def text_tokens(rng, size: int) -> np.ndarray:
    """Returns `size` consecutive tokens of the sample's text, from a random place on."""
    first = rng.integers(0, len(_text()))
    return np.take(_text(), np.arange(first, first + size), mode="wrap")


def counterfactual_groups(shape: Shape, seed: int = 0) -> list[ScoringGroup]:
    """Returns each group's full prompt, distinct ablated variants and pairs to score."""
    rng = np.random.default_rng(seed)
    return [_group(shape, rng) for _ in range(shape.groups)]


def _group(shape: Shape, rng) -> ScoringGroup:
    parts, atom_of_part = _prompt_parts(shape, rng)
    ideal = rng.choice(3, shape.atoms, p=IDEAL_SHARES)
    actual = np.array([[rng.choice(3, p=ACTUAL_SHARES[level]) for level in ideal]
                       for _ in range(shape.group_size)])
    members = np.asarray(credit.channel_members(
        np.broadcast_to(ideal, actual.shape), actual, np.ones(actual.shape, bool)))
    members = members & (np.asarray(credit.localization_signs()) != 0)[:, None]

    prompts, variants, pairs = [np.concatenate(parts).tolist()], {}, []
    for response in range(shape.group_size):
        pairs.append((0, response))
        for removed in members[response][members[response].any(-1)]:
            key = removed.tobytes()
            if key not in variants:
                variants[key] = len(prompts)
                kept = [part for part, atom in zip(parts, atom_of_part)
                        if atom is None or not removed[atom]]
                prompts.append(np.concatenate(kept).tolist())
            pairs.append((variants[key], response))
    responses = [text_tokens(rng, shape.response_tokens).tolist()
                 for _ in range(shape.group_size)]
    return ScoringGroup(prompts, responses, pairs)


def _prompt_parts(shape: Shape, rng):
    """Returns the prompt's pieces and, for each, the atom that it words (None: always there)."""
    head = int(shape.prompt_tokens * HEAD_SHARE)
    tail = int(shape.prompt_tokens * TAIL_SHARE)
    atom_sizes = np.full(shape.atoms, (shape.prompt_tokens - head - tail) // shape.atoms)
    atom_sizes[:shape.prompt_tokens - head - tail - atom_sizes.sum()] += 1
    sizes = [head, *atom_sizes, tail]
    return ([text_tokens(rng, size) for size in sizes],
            [None, *range(shape.atoms), None])
