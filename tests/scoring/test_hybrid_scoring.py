"""Scoring with delta net layers: variants fork the states of the full prompt."""

import dataclasses

import hybrid_models
import numpy as np
import pytest

from memcalib_jax.models.delta_net import CHUNK
from memcalib_jax.scoring import ScoringGroup, score_counterfactuals, score_dense
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.scoring.counterfactual import pack_groups

DENSE = hybrid_models.CONFIG
SPARSE = dataclasses.replace(DENSE, family="qwen3_5_moe", experts=hybrid_models.EXPERTS)


def random_group(seed):
    """Variants that leave the full prompt within each of its chunks, at a boundary, at its end."""
    random = np.random.RandomState(seed)
    full = random.randint(0, 61, 2 * CHUNK + 20).tolist()
    cuts = (5, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK + 9)
    prompts = [full, *(full[:cut] + full[cut + 4:] for cut in cuts), full[:CHUNK], full + [1, 2]]
    responses = [random.randint(0, 61, n).tolist() for n in (3, 1, CHUNK + 6)]
    pairs = [(p, g) for p in range(len(prompts)) for g in range(3) if (p + g) % 3]
    return ScoringGroup(prompts, responses, pairs)


@pytest.mark.parametrize("config, bin_tokens", [(DENSE, 8192), (DENSE, 400), (SPARSE, 8192)],
                         ids=["one bin", "several bins", "experts"])
def test_shared_equals_dense(config, bin_tokens):
    params, groups = hybrid_models.random_params(config), [random_group(1), random_group(2)]
    packing = pack_groups(config, groups, bin_sizes(8192))
    assert packing.tree_tokens < 0.5 * packing.dense_tokens
    scored = score_counterfactuals(params, config, groups, bin_tokens=bin_tokens)
    for group, rows in zip(groups, scored, strict=True):
        expected = score_dense(params, config, [group.prompts[p] for p, _ in group.pairs],
                               [group.responses[g] for _, g in group.pairs])
        for ours, theirs in zip(rows, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)
