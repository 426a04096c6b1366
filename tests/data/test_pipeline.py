import itertools
import json
from collections import Counter

import pytest

from memcalib_jax.data import load_records, prompt_batches, sample_path


def _take(batches, count):
    return list(itertools.islice(batches, count))


def test_batches_that_fit_are_epochs_of_new_permutations():
    batches = _take(prompt_batches(range(12), num_prompts=4, seed=0), 9)
    epochs = [sum(batches[start : start + 3], []) for start in (0, 3, 6)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(12))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != list(range(12))


@pytest.mark.parametrize("count, num_prompts", [(5, 4), (7, 3), (36, 8), (10, 7), (4, 4), (1, 1)])
def test_batches_hold_distinct_records_and_drop_none(count, num_prompts):
    steps = 12 * count // num_prompts
    seen = Counter()
    for step, batch in enumerate(
        _take(prompt_batches(range(count), num_prompts=num_prompts, seed=1), steps), start=1
    ):
        assert len(batch) == len(set(batch)) == num_prompts
        seen.update(batch)
        fair = step * num_prompts / count
        # A record is at most one epoch's place and one postponed batch away from its fair share.
        assert max(seen.values()) <= fair + 1
        assert min(seen[index] for index in range(count)) >= fair - 2
    assert sum(seen.values()) == steps * num_prompts


def test_a_record_that_would_come_twice_waits_for_the_next_batch():
    """Follows the stream by hand: duplicates move to the front of the next batch."""
    batches = prompt_batches(range(5), num_prompts=4, seed=3)
    stream = [batches._stream[position] for position in range(24)]
    for batch in _take(batches, 5):
        expected, postponed = [], []
        while len(expected) < 4:
            index = stream.pop(0)
            (postponed if index in expected else expected).append(index)
        stream = postponed + stream
        assert batch == expected


def test_the_seed_decides():
    first = _take(prompt_batches(range(20), num_prompts=5, seed=7), 8)
    assert _take(prompt_batches(range(20), num_prompts=5, seed=7), 8) == first
    assert _take(prompt_batches(range(20), num_prompts=5, seed=8), 8) != first


def test_yields_the_records_themselves():
    records = load_records(sample_path("records.jsonl"))
    batch = next(prompt_batches(records, num_prompts=48, seed=0))
    assert sorted(record.id for record in batch) == sorted(record.id for record in records)
    assert all(any(record is other for other in records) for record in batch)


@pytest.mark.parametrize("count, num_prompts", [(12, 4), (5, 4), (7, 3)])
def test_a_restored_stream_goes_on_alike_through_later_epochs(count, num_prompts):
    whole = _take(prompt_batches(range(count), num_prompts=num_prompts, seed=2), 12)
    for taken in (0, 1, 2, 5, 8):
        first = prompt_batches(range(count), num_prompts=num_prompts, seed=2)
        _take(first, taken)
        state = json.loads(json.dumps(first.get_state()))
        again = prompt_batches(range(count), num_prompts=num_prompts, seed=2)
        next(again)
        again.set_state(state)
        assert _take(again, 12 - taken) == whole[taken:]
        assert _take(first, 12 - taken) == whole[taken:]


def test_a_state_does_not_change_with_the_stream():
    batches = prompt_batches(range(5), num_prompts=4, seed=3)
    next(batches)
    next(batches)
    state = batches.get_state()
    kept = json.dumps(state)
    expected = _take(batches, 3)
    assert json.dumps(state) == kept
    batches.set_state(state)
    assert _take(batches, 3) == expected
    assert json.dumps(state) == kept


def test_refuses_a_state_of_other_data_or_another_seed():
    state = prompt_batches(range(8), num_prompts=4, seed=2).get_state()
    with pytest.raises(ValueError, match="num_items 8, but this run has 9"):
        prompt_batches(range(9), num_prompts=4, seed=2).set_state(state)
    with pytest.raises(ValueError, match="seed 2, but this run has 3"):
        prompt_batches(range(8), num_prompts=4, seed=3).set_state(state)


@pytest.mark.parametrize(
    "count, num_prompts, seed, problem",
    [
        (3, 4, 0, "3 records cannot fill a batch of 4 different prompts"),
        (3, 0, 0, "num_prompts must be at least 1, not 0"),
        (3, 2, -1, "seed must not be negative"),
    ],
)
def test_refuses_what_cannot_be_batched(count, num_prompts, seed, problem):
    with pytest.raises(ValueError, match=problem):
        prompt_batches(range(count), num_prompts=num_prompts, seed=seed)
