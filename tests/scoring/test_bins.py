import numpy as np
import pytest

from memcalib_jax.scoring.bins import bin_sizes, fill, segment_room
from memcalib_jax.scoring.prefix_tree import build_tree


def group(prompt, *responses):
    """A tree of one prompt and its responses, of the given lengths and distinct tokens."""
    numbers = iter(range(10_000))
    prompt, *responses = ([next(numbers) for _ in range(n)] for n in (prompt, *responses))
    return build_tree([prompt], responses, [(0, g) for g in range(len(responses))])


def test_sizes_grow_by_at_most_an_eighth():
    assert bin_sizes(512) == (144, 160, 176, 192, 208, 224, 240, 256,
                              288, 320, 352, 384, 416, 448, 480, 512)
    assert bin_sizes(100) == (63, 70, 77, 84, 91, 98, 105, 112)
    sizes = bin_sizes(8192)
    assert sizes[0] == 144 and sizes[-1] == 8192
    assert all(larger <= smaller * 1.125 for smaller, larger in zip(sizes, sizes[1:]))


def test_one_bin_of_the_least_size_that_holds_everything():
    size, bins = fill([group(20, 10, 10), group(30, 5)], bin_sizes(128))
    assert (size, len(bins), bins[0].size) == (80, 1, 75)
    assert bins[0].starts[0, 0] == 0 and bins[0].leaves == [(0, 1), (0, 2), (1, 1)]


def test_whole_trees_share_bins_where_splitting_would_repeat_prompts():
    trees = [group(40, 20), group(40, 20), group(40, 24), group(40, 24)]
    size, bins = fill(trees, (128,))
    assert (size, len(bins)) == (128, 2)
    assert sorted(bin_.size for bin_ in bins) == [120, 128]
    assert {frozenset(tree for tree, _ in bin_.leaves) for bin_ in bins} == {
        frozenset({0, 1}), frozenset({2, 3})}


def test_a_tree_larger_than_a_bin_is_split_and_its_prompt_laid_again():
    size, bins = fill([group(30, 20, 20, 20)], (64,))
    assert [bin_.size for bin_ in bins] == [50, 50, 50]
    assert [bin_.leaves for bin_ in bins] == [[(0, 1)], [(0, 2)], [(0, 3)]]
    assert all(bin_.starts[0, 0] == 0 for bin_ in bins)


def test_a_response_longer_than_every_size_makes_bins_larger():
    size, bins = fill([group(90, 30)], bin_sizes(64))
    assert (size, len(bins)) == (120, 1)


def test_fixed_sizes_are_kept():
    """Nothing fits one bin of the sizes allowed: more bins, no new size."""
    size, bins = fill([group(20, 10), group(20, 10), group(20, 10)], (32, 40))
    assert (size, len(bins)) == (32, 3)


@pytest.mark.parametrize("num_bins", [1, 2, 4])
def test_bins_come_in_multiples(num_bins):
    _, bins = fill([group(20, 10)] * 3, (32,), num_bins)
    assert len(bins) == -(-3 // num_bins) * num_bins


def test_a_bin_has_room_for_so_many_segments():
    size, bins = fill([group(4, *[1] * 40)], (128,))
    assert segment_room(128) == 8
    assert all(len(bin_.starts) <= 8 for bin_ in bins)
    assert sorted(leaf for bin_ in bins for leaf in bin_.leaves) == [(0, n) for n in range(1, 41)]


def test_every_response_lies_once_with_its_ancestors_before_it():
    random = np.random.default_rng(0)
    trees = [group(*random.integers(1, 40, 6)) for _ in range(12)]
    for sizes in (bin_sizes(80), bin_sizes(500), (96,)):
        size, bins = fill(trees, sizes)
        leaves = [leaf for bin_ in bins for leaf in bin_.leaves]
        assert sorted(leaves) == sorted((n, leaf) for n, tree in enumerate(trees)
                                        for leaf in set(tree.leaves))
        for bin_ in bins:
            assert bin_.size <= size
            for number, leaf in bin_.leaves:
                for ancestor, _ in trees[number].segments[leaf].ancestors:
                    assert bin_.starts[number, ancestor] < bin_.starts[number, leaf]
