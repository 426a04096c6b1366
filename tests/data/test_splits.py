from collections import Counter

import pytest

from memcalib_jax.data import (
    Record,
    load_records,
    sample_path,
    split_by_ids,
    stratified_split,
)


def _records(**counts):
    """Makes bare records: `counts` of each domain, interleaved."""
    records = []
    for number in range(max(counts.values())):
        for domain, count in counts.items():
            if number < count:
                records.append(Record(f"{domain}-{number}", domain, "?", (), ()))
    return records


def _ids(records):
    return [record.id for record in records]


def test_splits_the_sample_evenly():
    records = load_records(sample_path("records.jsonl"))
    rest, held_out = stratified_split(records, 12, seed=0)
    assert (len(rest), len(held_out)) == (36, 12)
    domains = Counter(record.domain for record in held_out)
    assert domains == {"health_seed": 4, "general": 4, "coding": 4}
    assert sorted(_ids(rest) + _ids(held_out)) == sorted(_ids(records))
    assert _ids(held_out) == [id for id in _ids(records) if id in set(_ids(held_out))]
    assert _ids(rest) == [id for id in _ids(records) if id in set(_ids(rest))]


@pytest.mark.parametrize(
    "counts, held_out, shares",
    [
        # Quotas 2.5, 1.5, 1.0: one place is left and two remainders tie; "a" comes first.
        ({"b": 5, "a": 3, "c": 2}, 5, {"b": 2, "a": 2, "c": 1}),
        # Quotas 1.4, .3, .3: the place goes to the largest remainder.
        ({"a": 14, "b": 3, "c": 3}, 2, {"a": 2}),
        # Quotas 1.2, .9, .9.
        ({"a": 4, "b": 3, "c": 3}, 3, {"a": 1, "b": 1, "c": 1}),
        ({"a": 2, "b": 1}, 0, {}),
        ({"a": 2, "b": 1}, 3, {"a": 2, "b": 1}),
    ],
)
def test_shares_follow_the_largest_remainders(counts, held_out, shares):
    rest, chosen = stratified_split(_records(**counts), held_out, seed=3)
    assert Counter(record.domain for record in chosen) == shares
    assert len(rest) == sum(counts.values()) - held_out


def test_the_draw_depends_on_seed_and_ids_alone():
    records = _records(a=20, b=20)
    chosen = set(_ids(stratified_split(records, 10, seed=1)[1]))
    assert set(_ids(stratified_split(records[::-1], 10, seed=1)[1])) == chosen
    assert set(_ids(stratified_split(records, 10, seed=2)[1])) != chosen
    assert set(_ids(stratified_split(records, 20, seed=1)[1])) > chosen
    # Another domain of the same size leaves the draw of the others alone.
    more = _records(a=20, b=20, c=20)
    assert {id for id in _ids(stratified_split(more, 15, seed=1)[1]) if id[0] != "c"} == chosen


def test_the_draw_stays_the_same_for_ever():
    # sha256 of "0/a-0" to "0/a-5" starts with f62c, 651c, 936e, 6f89, 787f, b8fc.
    for held_out, numbers in [(1, "1"), (2, "13"), (4, "1234")]:
        chosen = stratified_split(_records(a=6), held_out, seed=0)[1]
        assert _ids(chosen) == [f"a-{number}" for number in numbers]


@pytest.mark.parametrize("held_out", [-1, 4])
def test_refuses_a_split_larger_than_the_records(held_out):
    with pytest.raises(ValueError, match=f"from 0 to 3 records, not {held_out}"):
        stratified_split(_records(a=3), held_out, seed=0)


def test_refuses_to_draw_from_repeated_ids():
    with pytest.raises(ValueError, match="'a-0' is repeated"):
        stratified_split(_records(a=3) + _records(a=1), 2, seed=0)


def test_splits_by_ids_in_the_order_of_the_records():
    rest, named = split_by_ids(_records(a=2, b=2), ["b-1", "a-0"])
    assert (_ids(rest), _ids(named)) == (["b-0", "a-1"], ["a-0", "b-1"])


def test_splits_by_a_file_of_ids(tmp_path):
    path = tmp_path / "ids.txt"
    path.write_bytes(b"\xef\xbb\xbfb-1\r\n\n  a-0\n")
    rest, named = split_by_ids(_records(a=2, b=2), path)
    assert (_ids(rest), _ids(named)) == (["b-0", "a-1"], ["a-0", "b-1"])
    assert split_by_ids(_records(a=2, b=2), str(path)) == (rest, named)


def test_refuses_ids_that_do_not_fit(tmp_path):
    records = _records(a=2)
    with pytest.raises(ValueError, match="1 of 2 ids name no record: 'x'"):
        split_by_ids(records, ["a-0", "x"])
    with pytest.raises(ValueError, match="id 'a-0' is repeated"):
        split_by_ids(records, ["a-0", "a-1", "a-0"])
    with pytest.raises(ValueError, match="absent.txt: the ids cannot be read"):
        split_by_ids(records, tmp_path / "absent.txt")
