import numpy as np
import pytest

from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.scoring.packing import bucket, pack
from memcalib_jax.scoring.prefix_tree import build_tree, common_prefix


def test_common_prefix():
    assert common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2
    assert common_prefix(np.array([1, 2]), np.array([1, 2, 3])) == 2
    assert common_prefix(np.array([9]), np.array([1])) == 0


def test_tree_by_hand():
    full, variant = [1, 2, 3, 4, 5], [1, 2, 4, 5]
    tree = build_tree([full, variant], [[7, 8], [9]], [(0, 0), (0, 1), (1, 0)])
    described = [(s.tokens.tolist(), s.position, s.ancestors) for s in tree.segments]
    assert described == [
        ([1, 2, 3, 4, 5], 0, ()),
        ([7, 8], 5, ((0, 5),)),
        ([9], 5, ((0, 5),)),
        ([4, 5], 2, ((0, 2),)),
        ([7, 8], 4, ((0, 2), (3, 2))),
    ]
    assert tree.leaves == (1, 2, 4)
    assert tree.tokens == 5 + 2 + 1 + 2 + 2
    assert tree.dense_tokens == 7 + 6 + 6


def test_a_variant_that_is_a_prefix_keeps_its_last_token():
    tree = build_tree([[1, 2, 3], [1, 2]], [[7]], [(1, 0)])
    rest = tree.segments[tree.segments[tree.leaves[0]].ancestors[-1][0]]
    assert (rest.tokens.tolist(), rest.position, rest.ancestors[0][1]) == ([2], 1, 1)


def test_variants_branch_at_multiples():
    """One leaves after 5 tokens, one after 3; one is the full prompt; one ends at a multiple."""
    full = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    prompts = [full, [1, 2, 3, 4, 5, 0], [1, 2, 3, 0], full, [1, 2, 3, 4]]
    tree = build_tree(prompts, [[7]], [(p, 0) for p in range(5)], branch_multiple=4)
    found = [(segment.tokens.tolist(), segment.position, segment.ancestors)
             for segment in tree.segments]
    assert found == [
        (full, 0, ()), ([7], 9, ((0, 9),)),
        ([5, 0], 4, ((0, 4),)), ([7], 6, ((0, 4), (2, 2))),
        ([1, 2, 3, 0], 0, ()), ([7], 4, ((4, 4),)),
        ([1, 2, 3, 4], 0, ()), ([7], 4, ((6, 4),))]
    assert tree.leaves == (1, 3, 5, 1, 7)


def test_equal_prompts_and_equal_pairs_are_one():
    tree = build_tree([[1, 2], [1, 2], [1, 2]], [[5], [5]], [(0, 0), (1, 0), (2, 1), (0, 0)])
    assert tree.tokens == 3
    assert tree.leaves == (1, 1, 1, 1)


def test_equal_pairs_are_kept_apart_where_asked():
    tree = build_tree([[1, 2], [1, 2]], [[7], [7]], [(0, 0), (0, 1), (1, 0)], keep_repeats=True)
    assert len(set(tree.leaves)) == 3 and len(tree.segments) == 4
    assert {tree.segments[leaf].ancestors for leaf in tree.leaves} == {((0, 2),)}


def test_shifted_twin_shares_nothing():
    tree = build_tree([[1, 2], [1, 2]], [[5]], [(0, 0), (1, 0)], position_offsets=[0, 10])
    assert tree.tokens == 6
    assert [s.position for s in tree.segments] == [0, 2, 10, 12]


@pytest.mark.parametrize("arguments, message", [
    (([[]], [[1]], []), "prompt 0"),
    (([[1]], [[]], []), "response 0"),
    (([[1]], [[1]], [(1, 0)]), r"\(1, 0\)"),
    (([[1]], [[1]], [(0, -1)]), r"\(0, -1\)"),
])
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_tree(*arguments)


def test_negative_offset_is_refused():
    with pytest.raises(ValueError, match="negative"):
        build_tree([[1]], [[1]], [(0, 0)], position_offsets=[-1])


@pytest.mark.parametrize("size, smallest, expected", [
    (1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 1, 4), (5, 1, 6), (7, 1, 8), (9, 1, 12), (13, 1, 16),
    (1, 16, 16), (33, 16, 48), (49, 16, 64), (65, 16, 96), (100, 64, 128), (129, 64, 192),
])
def test_bucket(size, smallest, expected):
    assert bucket(size, smallest) == expected


def random_trees(count=6):
    rng = np.random.default_rng(3)
    trees = []
    for _ in range(count):
        full = rng.integers(0, 50, 30)
        variants = [np.delete(full, range(i, i + 4)) for i in (3, 9, 20)]
        responses = [rng.integers(0, 50, n) for n in (5, 2, 8)]
        pairs = [(v, g) for v in range(4) for g in range(3)]
        trees.append(build_tree([full, *variants], responses, pairs))
    return trees


@pytest.mark.parametrize("bin_tokens", [40, 100, 1000])
@pytest.mark.parametrize("num_bins", [1, 3])
def test_every_pair_has_its_own_targets_once(bin_tokens, num_bins):
    trees = random_trees()
    packing = pack(trees, bin_sizes(bin_tokens), num_bins=num_bins)
    assert {batch.targets.shape for batch in packing.batches} == {packing.batches[0].targets.shape}
    taken = [np.zeros(batch.targets.shape, int) for batch in packing.batches]
    for tree, places in zip(trees, packing.places, strict=True):
        for leaf, (batch, row, offset, length) in zip(tree.leaves, places, strict=True):
            segment = tree.segments[leaf]
            place = slice(offset, offset + length)
            np.testing.assert_array_equal(
                packing.batches[batch].targets[row, place], segment.tokens)
            taken[batch][row, place] += 1
    counts = np.concatenate([batch.counts for batch in packing.batches])
    assert sum(t.sum() for t in taken) == counts.sum()
    assert max(t.max() for t in taken) == 1


def test_small_bins_repeat_ancestors():
    trees = random_trees()
    packing = pack(trees, bin_sizes(64))
    filled = [int(batch.packed.segments[0].length.sum()) for batch in packing.batches]
    assert len(packing.batches) > len(trees)
    assert max(filled) <= packing.bin_size <= 64
    assert sum(filled) == packing.tree_tokens > sum(tree.tokens for tree in trees)
    assert packing.padded_tokens == len(filled) * packing.bin_size


def test_rows_and_batched_are_inverse():
    trees = random_trees()
    packing = pack(trees, bin_sizes(100))
    rng = np.random.default_rng(0)
    rows = [[rng.normal(size=len(tree.segments[leaf].tokens)).astype(np.float32)
             for leaf in tree.leaves] for tree in trees]
    back = packing.rows(packing.batched(rows))
    for mine, theirs in zip(sum(rows, []), sum(back, [])):
        np.testing.assert_array_equal(mine, theirs)
