import random

import pytest

from memcalib_jax.data.near_identical import near_identical


def test_by_hand():
    first = ["How do I sort a list?", "What should I eat?", "???"]
    second = ["how do i SORT a list!", "How do I sort a long list?", "???", "", "What is it?"]
    # six words; seven words of which six are shared; no word at all
    assert near_identical(first, second, threshold=0.8) == [(0, 0, 1.0), (0, 1, 6 / 7), (2, 2, 1.0)]
    assert near_identical(first, second) == [(0, 0, 1.0), (2, 2, 1.0)]
    assert near_identical(first, []) == []


def test_a_share_of_just_the_threshold_counts():
    words = "a b c d e f g h i"
    assert near_identical([words], [words + " j"], threshold=0.9) == [(0, 0, 0.9)]
    assert near_identical([words], [words + " j k"], threshold=0.9) == []


def test_scripts_without_spaces_are_compared_by_character():
    assert near_identical(["我今天吃什么好呢朋友"], ["我今天吃什么好呢朋友？"]) == [(0, 0, 1.0)]
    assert near_identical(["我今天吃什么"], ["我明天喝什么"], threshold=0.5) == [(0, 0, 0.5)]


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.75, 0.9, 1.0])
def test_no_pair_is_missed(threshold):
    draw = random.Random(3)
    texts = [[" ".join(draw.choices("abcdefgh", k=draw.randint(1, 8))) for _ in range(60)]
             for _ in range(2)]

    def share(one, other):
        one, other = set(one.split()), set(other.split())
        return len(one & other) / len(one | other)

    expected = [(i, j, share(one, other)) for i, one in enumerate(texts[0])
                for j, other in enumerate(texts[1]) if share(one, other) >= threshold]
    assert len(expected) > 10
    assert near_identical(*texts, threshold=threshold) == expected


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.1, float("nan")])
def test_bad_threshold(threshold):
    with pytest.raises(ValueError, match="threshold must be in"):
        near_identical([], [], threshold=threshold)
