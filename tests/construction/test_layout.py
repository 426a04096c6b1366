import pytest

from memcalib_jax.construction.layout import LayoutLimits, block_sizes, interleave

LIMITS = LayoutLimits(3, 6, 2, 6)


@pytest.mark.parametrize("num_source", [1, 5, 12, 30, 35])
def test_sizes_keep_to_their_bounds_and_leave_room(num_source):
    seen = set()
    for number in range(300):
        sizes = block_sizes(f"s{number}", num_source, LIMITS)
        assert 3 <= len(sizes) <= 6 and all(2 <= size <= 6 for size in sizes)
        assert sum(sizes) >= num_source + 1
        seen.add(sizes)
    assert len(seen) > 20 or num_source > 30


def test_sizes_depend_on_sample_and_seed_alone():
    assert block_sizes("a", 4, LIMITS) == block_sizes("a", 4, LIMITS)
    drawn = {block_sizes("a", 4, LayoutLimits(3, 6, 2, 6, seed)) for seed in range(30)}
    assert len(drawn) > 20


def test_what_does_not_fit():
    assert block_sizes("a", 36, LIMITS) is None
    assert block_sizes("a", 3, LayoutLimits(1, 1, 4, 4)) == (4,)
    assert block_sizes("a", 4, LayoutLimits(1, 1, 4, 4)) is None


def test_both_lists_keep_their_order():
    for number in range(50):
        mixed = interleave(f"s{number}", [1, 2, 3], [-1, -2, -3, -4], LIMITS)
        assert [item for item in mixed if item > 0] == [1, 2, 3]
        assert [item for item in mixed if item < 0] == [-1, -2, -3, -4]
    assert len({tuple(interleave(f"s{n}", [1, 2], [-1, -2], LIMITS)) for n in range(60)}) == 6


@pytest.mark.parametrize("bounds", [(0, 3, 1, 2), (4, 3, 1, 2), (1, 3, 3, 2), (1, 1, 0, 2)])
def test_bounds_that_are_none(bounds):
    with pytest.raises(ValueError, match="must be at least 1"):
        LayoutLimits(*bounds)
