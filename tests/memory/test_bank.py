"""Operations on a bank, its snapshots, and its JSON."""

import json

import pytest

from memcalib_jax.memory.bank import (
    MAX_HISTORY, Bank, BankError, Delete, Insert, NoOperation, Update, Wording)
from memcalib_jax.memory.words import count_words

EMPTY = Bank(("Odile", "Bram"), seed="smp-conv-1")


def bank_of(*contents, bank=EMPTY, session=1):
    operations = [Insert("Bram", content, f"D{session}:{n}") for n, content in enumerate(contents)]
    return bank.apply(operations, session=session, time="noon")[0]


def only(bank):
    entry, = bank.entries.values()
    return entry


def test_insert_stamps_session_and_time():
    bank, outcomes = EMPTY.apply([Insert("Bram", "Bram has a cat.", "D3:2")], session=3, time="noon")
    entry = only(bank)
    assert (entry.speaker, entry.content, entry.session, entry.time, entry.dia_ids, entry.history) \
        == ("Bram", "Bram has a cat.", 3, "noon", ("D3:2",), ())
    assert outcomes == {"inserted": 1}
    assert len(entry.id) == 8 and int(entry.id, 16) >= 0
    assert not EMPTY.entries


def test_an_exact_duplicate_only_adds_its_turn():
    first = bank_of("Bram has a cat.")
    again = [Insert("Bram", "Bram has a cat.", "D2:5"), Insert("Odile", "Bram has a cat.", "D2:6")]
    bank, outcomes = first.apply(again, session=2, time="later")
    bram, odile = bank.entries.values()
    assert (bram.dia_ids, bram.time, odile.dia_ids) == (("D1:0", "D2:5"), "noon", ("D2:6",))
    assert outcomes == {"merged": 1, "inserted": 1}


def test_update_keeps_first_time_and_old_wording():
    first = bank_of("Bram runs.")
    update = Update(only(first).id, "Bram swims, since his knee hurts.", "D2:3")
    bank, outcomes = first.apply([update], session=2, time="later")
    entry = only(bank)
    assert (entry.content, entry.session, entry.time) == (update.content, 1, "noon")
    assert entry.dia_ids == ("D1:0", "D2:3")
    assert entry.history == (Wording("Bram runs.", 2),)
    assert outcomes == {"updated": 1}
    assert only(first).content == "Bram runs."


def test_history_keeps_the_newest_wordings():
    bank = bank_of("wording 0")
    for n in range(1, MAX_HISTORY + 6):
        bank, _ = bank.apply([Update(only(bank).id, f"wording {n}", "D1:0")], session=n, time="")
    history = only(bank).history
    assert (len(history), history[0], history[-1]) \
        == (20, Wording("wording 5", 6), Wording("wording 24", 25))


def test_delete_drops_turns_that_nobody_else_rests_on():
    bank = bank_of("one", "two")
    one, two = bank.entries
    bank, _ = bank.apply([Update(two, "two", "D1:0"), Update(one, "one", "D1:9")],
                         session=1, time="noon")
    assert bank.dia_ids == {"D1:0", "D1:1", "D1:9"}
    bank, outcomes = bank.apply([Delete(one)], session=1, time="noon")
    assert (bank.dia_ids, list(bank.entries), outcomes) == ({"D1:0", "D1:1"}, [two], {"deleted": 1})


def test_what_cannot_be_done_is_skipped_and_counted():
    first = bank_of("one")
    id = only(first).id
    operations = [
        Delete("00000000"), Update("nobody", "x", "D1:1"), Insert("Noor", "x", "D1:1"),
        NoOperation(), Update(id, "one", "D1:0"), Insert("Bram", "one", "D1:0"),
        Delete(id), Delete(id)]
    bank, outcomes = first.apply(operations, session=1, time="noon")
    assert outcomes == {"unknown_id": 3, "unknown_speaker": 1, "no_operation": 1, "repeated": 2,
                        "deleted": 1}
    assert not bank.entries


def test_a_list_that_changes_nothing_returns_the_bank_itself():
    first = bank_of("one")
    assert first.apply([NoOperation(), Delete("gone")], session=2, time="")[0] is first


def test_ids_come_from_seed_and_count_alone():
    one, other = bank_of("a", "b"), bank_of("c", "d")
    assert list(one.entries) == list(other.entries)
    elsewhere = bank_of("a", "b", bank=Bank(EMPTY.speakers, seed="smp-conv-2"))
    assert not set(elsewhere.entries) & set(one.entries)
    emptied, _ = one.apply([Delete(id) for id in one.entries], session=2, time="")
    assert not set(bank_of("a", bank=emptied).entries) & set(one.entries)


def test_many_ids_are_distinct():
    assert len(bank_of(*map(str, range(3000)))) == 3000


def test_words_are_counted_as_the_reward_counts_them():
    assert count_words("Bram's cat, Gasket: 2 gloves!") == 6
    assert count_words(" -- ") == 0
    assert bank_of("Bram's cat", "two words").num_words == 5


def test_json_round_trip():
    bank = bank_of("one", "zwei \u2014 drei")
    bank, _ = bank.apply([Update(next(iter(bank.entries)), "uno", "D2:1")], session=2, time="2 pm")
    again = Bank.from_json(json.loads(json.dumps(bank.to_json())))
    assert again == bank
    assert list(again.entries) == list(bank.entries)
    assert bank_of("next", bank=again) == bank_of("next", bank=bank)


@pytest.mark.parametrize("change, message", [
    (lambda v: v.pop("entries"), "the bank: entries must be there"),
    (lambda v: v["entries"].append(v["entries"][0]), "entry 2 repeats the id"),
    (lambda v: v["entries"][0].update(session="1"), "entry 1: session must be there and be of "),
    (lambda v: v["entries"][0].update(dia_ids=[1]), "entry 1: dia_ids must hold texts"),
    (lambda v: v["entries"].append("x"), "entry 2: history must be there"),
    (lambda v: v.update(made=True), "the bank: made must be"),
])
def test_a_damaged_bank_is_refused(change, message):
    value = bank_of("one").to_json()
    change(value)
    with pytest.raises(BankError, match=message):
        Bank.from_json(value)
