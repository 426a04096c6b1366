"""Scores responses under a prompt and its ablated variants, sharing what can be shared."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec

from memcalib_jax.models.attention import over_bins
from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.delta_net import CHUNK
from memcalib_jax.models.layers import head_matrix
from memcalib_jax.models.on_mesh import (
    num_row_shards, on_shards, rows_spec, tensor_spec, varying, whole)
from memcalib_jax.models.packed import hidden_states_and_load
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.scoring.log_probs import token_log_probs
from memcalib_jax.scoring.packing import Packing, ScoredBatch, pack
from memcalib_jax.scoring.prefix_tree import build_tree

DEFAULT_BIN_TOKENS = 8192


@dataclasses.dataclass(frozen=True)
class ScoringGroup:
    """Responses to score under the variants of one prompt.

    Attributes:
      prompts: token ids; `prompts[0]` is the full prompt, the others are its variants.
      responses: token ids.
      pairs: (prompt index, response index); nothing is implied, the full prompt's log-probs
        need pairs of their own.
      position_offsets: shift of each prompt's positions, 0 where not given. A shifted twin of
        the full prompt means the same to a rotary model and shares nothing with it, so that
        the difference of their log-probs is the noise floor of a counterfactual difference.
    """

    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]
    pairs: Sequence[tuple[int, int]]
    position_offsets: Sequence[int] | None = None


def batch_log_probs(params: dict, config: ModelConfig, batch: ScoredBatch,
                    temperature: jax.Array | float = 1.0, *, remat: str = "none"):
    """Returns log-probs and entropies of a packed batch's targets, float32 `[bins, M]`, nats.

    Values beyond a bin's `counts` are finite and without meaning. Differentiable in `params`;
    `remat` is one of `models.packed.REMAT`. The third is how many of the packed tokens
    each expert of each layer got, float32 `[L, E]`, None for a model without experts.
    """
    hidden, load = hidden_states_and_load(params, config, batch.packed, remat=remat)
    head = head_matrix(params)
    bins, vocabulary = rows_spec(hidden.shape[0]), tensor_spec(head.shape[0])

    def local(head, *rows):
        head = varying(head, bins)

        def one_bin(hidden, sources, targets, count):
            return token_log_probs(hidden[sources], head, targets, temperature, count=count,
                                   axis_name=vocabulary)

        return over_bins(one_bin, *rows)

    rows = PartitionSpec(bins)
    local = on_shards(local, (PartitionSpec(vocabulary), rows, rows, rows, rows), rows)
    log_probs, entropy = local(head, hidden, batch.sources, batch.targets, batch.counts)
    return whole(log_probs), whole(entropy), load


score_batch = functools.partial(jax.jit, static_argnames=("config", "remat"))(batch_log_probs)


def score_packing(params: dict, config: ModelConfig, packing: Packing,
                  temperature: float = 1.0) -> list[list[np.ndarray]]:
    """Returns the log-probs of every pair of a packing, one float32 array each, in nats."""
    values = [score_batch(params, config, batch, temperature)[0] for batch in packing.batches]
    return packing.rows(jax.device_get(values))


def branch_multiple(config: ModelConfig) -> int:
    """Returns where variants may leave the full prompt: at multiples of so many tokens."""
    return CHUNK if config.delta else 1


def pack_groups(config: ModelConfig, groups: Sequence[ScoringGroup], sizes: Sequence[int], *,
                keep_repeats: bool = False) -> Packing:
    """Packs every group's tree of distinct segments as the model needs it.

    `sizes` are as in `pack`, `keep_repeats` is as in `build_tree`. On a mesh each device that
    rows are split over has a bin in every batch.
    """
    trees = [build_tree(group.prompts, group.responses, group.pairs,
                        position_offsets=group.position_offsets,
                        branch_multiple=branch_multiple(config), keep_repeats=keep_repeats)
             for group in groups]
    return pack(trees, sizes, num_bins=num_row_shards(), by_level=config.delta is not None)


def score_counterfactuals(params: dict, config: ModelConfig, groups: Sequence[ScoringGroup], *,
                          temperature: float = 1.0, bin_tokens: int = DEFAULT_BIN_TOKENS
                          ) -> list[list[np.ndarray]]:
    """Scores each pair of each group; every distinct prompt segment is computed once a bin.

    The terms of d in Section 3.2, arXiv 2609.24259:
    log p(y_t | x, M, y_<t) and log p(y_t | x, M without a channel's atoms, y_<t).

    Args:
      params, config: the model.
      groups: prompts, responses and the pairs wanted.
      temperature: positive; log-probs are of the distribution at this temperature.
      bin_tokens: about the most tokens of one device call's bin.

    Returns:
      For each group, one float32 array of the response's length a pair, in nats, in order.

    Raises:
      ValueError: empty prompts or responses, indices out of range, temperature not positive.
    """
    check_temperature(temperature)
    if not any(len(group.pairs) for group in groups):
        return [[] for _ in groups]
    packing = pack_groups(config, groups, bin_sizes(bin_tokens))
    return score_packing(params, config, packing, temperature)


def check_temperature(temperature: float):
    if not temperature > 0:
        raise ValueError(f"temperature must be positive to score, got {temperature}")
