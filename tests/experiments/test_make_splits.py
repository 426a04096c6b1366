"""`python -m experiments.make_splits` on the sample records."""

import hashlib
import json

import pytest

from memcalib_jax.data import load_records, sample_path, stratified_split

SIZES = {"num_test": 6, "num_validation": 6, "num_cold_start": 12, "num_rl": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("splits")
    lines = sample_path("records.jsonl").read_text().splitlines(keepends=True)
    ids = [json.loads(line)["id"] for line in lines]
    (folder / "train.jsonl").write_text("".join(lines[6:]))
    (folder / "test.jsonl").write_text("".join(lines[:6]))
    copied = json.loads(lines[0]) | {"id": "copied"}
    copied["question"] = copied["question"].upper() + " !"
    (folder / "leaking.jsonl").write_text("".join(lines[6:]) + json.dumps(copied) + "\n")
    for name, chosen in {"rl": ids[40:], "validation": ids[6:9], "overlap": ids[8:12],
                         "unknown": ["nobody"], "twice": [ids[6], ids[6]]}.items():
        (folder / f"{name}.txt").write_text("\n".join(chosen) + "\n")
    return folder


@pytest.fixture(scope="module")
def answers(folder, run_program):
    def flags(output, *switches, **changes):
        values = {"records_file": sample_path("records.jsonl"), "output_dir": folder / output,
                  **SIZES} | changes
        return [f"--{name}={value}" for name, value in values.items()] + list(switches)

    apart = {"records_file": folder / "train.jsonl", "test_file": folder / "test.jsonl",
             "num_rl": 6}
    leaking = apart | {"records_file": folder / "leaking.jsonl"}
    cases = {
        "drawn": flags("drawn"), "again": flags("drawn"), "elsewhere": flags("elsewhere"),
        "seed": flags("seed", seed=1), "other": flags("drawn", seed=1),
        "lists": flags("lists", **apart, rl_ids=folder / "rl.txt",
                       validation_ids=folder / "validation.txt"),
        "overlap": flags("x", **apart, rl_ids=folder / "overlap.txt",
                         validation_ids=folder / "validation.txt"),
        "unknown": flags("x", rl_ids=folder / "unknown.txt"),
        "twice": flags("x", rl_ids=folder / "twice.txt"),
        "no_list": flags("x", rl_ids=folder / "absent.txt"),
        "too_many": flags("x", num_rl=25),
        "two_tests": flags("x", **apart, test_ids=folder / "validation.txt"),
        "shared": flags("x", test_file=folder / "test.jsonl"),
        "leaking": flags("x", **leaking),
        "allowed": flags("allowed", **leaking, max_near_identical=1),
        "defaults": [f"--records_file={sample_path('records.jsonl')}",
                     f"--output_dir={folder / 'x'}"],
    }
    return dict(zip(cases, run_program("experiments.make_splits", *cases.values()), strict=True))


def ids(path):
    return [record.id for record in load_records(path)]


def manifest(folder):
    return json.loads((folder / "splits.json").read_text())


def test_every_record_has_its_place(answers, folder):
    assert answers["drawn"]["status"] == 0, answers["drawn"]["err"]
    everything = load_records(sample_path("records.jsonl"))
    split = {name: ids(folder / "drawn" / f"{name}.jsonl")
             for name in ("train", "test", "validation", "sft", "cold_start", "rl")}
    assert {name: len(values) for name, values in split.items()} == {
        "train": 42, "test": 6, "validation": 6, "sft": 36, "cold_start": 12, "rl": 24}
    assert sorted(split["train"] + split["test"]) == sorted(record.id for record in everything)
    assert sorted(split["sft"] + split["validation"]) == sorted(split["train"])
    assert sorted(split["cold_start"] + split["rl"]) == sorted(split["sft"])
    train, test = stratified_split(everything, 6, seed=0)
    assert split["test"] == [record.id for record in test]
    assert split["train"] == [record.id for record in train]


def test_domains_have_their_shares_in_the_table_and_the_manifest(answers, folder):
    rows = [line.split() for line in answers["drawn"]["out"].splitlines()[:7]]
    assert rows == [["coding", "general", "health_seed", "all"], ["train", *"14 14 14 42".split()],
                    ["test", *"2 2 2 6".split()], ["validation", *"2 2 2 6".split()],
                    ["sft", *"12 12 12 36".split()], ["cold_start", *"4 4 4 12".split()],
                    ["rl", *"8 8 8 24".split()]]
    splits = manifest(folder / "drawn")["splits"]
    assert splits["rl"]["by_domain"] == {"coding": 8, "general": 8, "health_seed": 8}
    for name, row in splits.items():
        data = (folder / "drawn" / f"{name}.jsonl").read_bytes()
        assert row["sha256"] == hashlib.sha256(data).hexdigest()
        assert row["records"] == len(data.splitlines())
    assert manifest(folder / "drawn")["near_identical"] == []


def test_lines_come_whole(answers, folder):
    source = [json.loads(line) for line in sample_path("records.jsonl").read_text().splitlines()]
    chosen = [json.loads(line)
              for line in (folder / "drawn" / "rl.jsonl").read_text().splitlines()]
    assert all(row in source for row in chosen)


def test_the_seed_decides(answers, folder):
    assert answers["again"]["status"] == answers["elsewhere"]["status"] == 0
    assert manifest(folder / "elsewhere") == manifest(folder / "drawn")
    assert answers["seed"]["status"] == 0
    assert ids(folder / "seed" / "test.jsonl") != ids(folder / "drawn" / "test.jsonl")
    assert answers["other"]["status"] == 2
    assert "holds other splits" in answers["other"]["err"]


def test_lists_of_ids_come_first(answers, folder):
    assert answers["lists"]["status"] == 0, answers["lists"]["err"]
    lists = {name: (folder / f"{name}.txt").read_text().split() for name in ("rl", "validation")}
    split = {name: ids(folder / "lists" / f"{name}.jsonl") for name in
             ("test", "validation", "sft", "cold_start", "rl")}
    assert split["rl"] == lists["rl"] and split["validation"] == lists["validation"]
    assert split["test"] == ids(folder / "test.jsonl")
    assert len(split["cold_start"]) == 12 and len(split["sft"]) == 42 - 3
    assert not set(split["cold_start"]) & {*split["rl"], *split["validation"], *split["test"]}
    rows = manifest(folder / "lists")["splits"]
    assert [name for name, row in rows.items() if row["from_ids"]] == ["validation", "rl"]


@pytest.mark.parametrize("case, message", [
    ("overlap", "--rl_ids: 1 ids are in an earlier list too"),
    ("unknown", "1 of 1 ids name no record: 'nobody'"),
    ("twice", "is repeated"),
    ("no_list", "the ids cannot be read"),
    ("too_many", "--num_rl=25: only 24 records are left for it"),
    ("two_tests", "--test_file and --test_ids both say what to test on"),
    ("shared", "--records_file and --test_file share 6 ids"),
    ("leaking", "1 questions of test or validation are nearly identical"),
    ("defaults", "--num_test=1500: only 48 records are left"),
])
def test_mistakes_are_refused_and_nothing_is_written(answers, folder, case, message):
    assert answers[case]["status"] == 2
    assert answers[case]["err"].startswith("error: ") and message in answers[case]["err"]
    assert not (folder / "x").exists()


def test_nearly_identical_questions_are_named(answers, folder):
    [pair] = manifest(folder / "allowed")["near_identical"]
    assert answers["allowed"]["status"] == 0
    assert (pair["split"], pair["train"], pair["share"]) == ("test", "copied", 1.0)
    assert pair["held_out"] == ids(folder / "test.jsonl")[0]
    assert f"test {pair['held_out']!r} and 'copied': 100%" in answers["leaking"]["err"]
