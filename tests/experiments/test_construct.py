"""`python -m experiments.construct` from sources to a benchmark, with the scripted stand-in."""

import csv
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest

from memcalib_jax.api.server import ChatServer, Refusal, serving
from memcalib_jax.construction import sample_paths
from memcalib_jax.construction.stand_in import MODEL_NAMES, answer
from memcalib_jax.data import load_records
from memcalib_jax.data.demonstrations import load_demonstrations

ROOT = pathlib.Path(__file__).parents[2]


SECRETS = {"MEMCALIB_GENERATOR_API_KEY": "sk-generator-secret-1",
           "MEMCALIB_REVIEWER_1_API_KEY": "sk-reviewer/secret-2",
           "MEMCALIB_REVIEWER_2_API_KEY": "sk-reviewer-secret-3"}


@pytest.fixture(scope="module")
def construct(open_program):
    return open_program("experiments.construct", **SECRETS)


@pytest.fixture(scope="module")
def built(construct, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "run"
    done = construct("--stand_in", f"--run_dir={folder}")
    assert done["status"] == 0, done["err"]
    return folder, done


def rows(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def test_our_own_sources_become_a_benchmark(built):
    folder, done = built
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = load_records(folder / "benchmark.jsonl")
    good, _ = sample_paths()
    assert [record.id for record in records] == [row["id"] for row in rows(good)]
    assert {record.domain for record in records} == {"health_seed", "general", "coding"}
    for record in records:
        assert any(atom.ideal > 0 for atom in record.atoms)
        assert 3 <= len(record.blocks) <= 6
        assert all(2 <= len(block.atom_ids) <= 6 for block in record.blocks)
    assert "24 records are in" in done["out"]


def test_every_bad_row_is_refused_for_its_reason(built):
    folder, _ = built
    _, bad = sample_paths()
    expected = {(row.get("id"), row["why"]) for row in rows(bad)}
    found = {(row["id"], f"{row['reason']}:{row['detail']}" if "duplicate" in row["reason"]
              else row["reason"]) for row in rows(folder / "refused.jsonl")}
    found |= {(row["id"], row["reason"]) for row in rows(folder / "stages" / "1_screening.jsonl")
              if row["decision"] == "rejected"}
    assert found == expected


def test_every_record_names_its_pipeline_and_the_origin_of_its_atoms(built):
    folder, _ = built
    name = json.loads((folder / "config.json").read_text())["pipeline"]
    for row in rows(folder / "benchmark.jsonl"):
        origin = row["provenance"]
        assert (origin["pipeline"], origin["frozen"]) == (name, False)
        assert origin["atom_origins"].count("hard_distractor") == 1
        ideal = [atom["u_star"] for atom in row["memories"]]
        assert len(ideal) == len(origin["atom_origins"])
        assert {level for level, kind in zip(ideal, origin["atom_origins"])
                if kind != "source"} == {"A"}


def test_a_second_run_asks_nothing_again(construct, built):
    folder, _ = built
    before = (folder / "benchmark.jsonl").read_bytes()
    journals = {path: path.read_bytes() for path in (folder / "stages").iterdir()}
    again = construct("--stand_in", f"--run_dir={folder}")
    assert again["status"] == 0, again["err"]
    assert (folder / "benchmark.jsonl").read_bytes() == before
    assert journals == {path: path.read_bytes() for path in (folder / "stages").iterdir()}


def test_the_statistics_are_those_of_the_records(built):
    folder, done = built
    records = load_records(folder / "benchmark.jsonl")
    total = [line for line in done["out"].splitlines() if line.startswith("all ")]
    assert total[0].split() == ["all", str(len(records)),
                                str(sum(len(record.blocks) for record in records)),
                                str(sum(len(record.atoms) for record in records))]
    assert json.loads((folder / "summary.json").read_text())["records"] == 24


class Endpoint(ChatServer):
    """The stand-in, which can be told to misbehave: `fault(body)` answers first, if it wants."""

    def __init__(self):
        super().__init__(0, dict.fromkeys((*MODEL_NAMES, "same"), "test"), self.respond)
        self.fault, self.asked, self.lock = None, [], threading.Lock()

    def respond(self, body):
        with self.lock:
            self.asked.append(json.dumps([body["model"], body["messages"]]))
            number = len(self.asked)
        fault = self.fault and self.fault(number, body)
        return fault if fault is not None else answer(body)


@pytest.fixture
def endpoint():
    with serving(Endpoint()) as server:
        yield server


def flags(endpoint, folder, *more):
    generator, *reviewers = MODEL_NAMES
    return [f"--generator_url={endpoint.base_url}", f"--generator_model={generator}",
            f"--reviewer_models={','.join(reviewers)}", f"--run_dir={folder}",
            "--requests_per_minute=100000", *more]


def start(*arguments):
    return subprocess.Popen([sys.executable, "-m", "experiments.construct", *arguments], cwd=ROOT,
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, **SECRETS})


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def slowly(number, body):
    time.sleep(0.05)


def check_whole(folder, built):
    """The benchmark is that of an undisturbed run, but for its pipeline's name."""
    def questions(path):
        return [(row["id"], row["question"], row["memory_blocks"])
                for row in rows(path / "benchmark.jsonl")]

    assert questions(folder) == questions(built[0])


def check_secrets(folder, *texts):
    for path in folder.rglob("*"):
        for secret in SECRETS.values():
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    for text in texts:
        assert not any(secret in text for secret in SECRETS.values())


def test_a_killed_run_goes_on_and_asks_nothing_twice(construct, endpoint, built, tmp_path):
    endpoint.fault = slowly
    process = start(*flags(endpoint, tmp_path / "run"))
    until(lambda: len(endpoint.asked) > 90)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = len(endpoint.asked)
    again = construct(*flags(endpoint, tmp_path / "run"))
    assert again["status"] == 0, again["err"]
    check_whole(tmp_path / "run", built)
    # 26 are screened; 24 go on, with five more calls and two reviews.
    assert before < 26 + 24 * 7
    assert len(set(endpoint.asked)) == 26 + 24 * 7
    twice = len(endpoint.asked) - len(set(endpoint.asked))
    # Only what was out when it died, which it says: on its way, or about to be.
    out = re.search(r"(\d+) calls were out", again["out"])
    assert twice <= (int(out[1]) if out else 0) <= 2 * 64
    check_secrets(tmp_path, again["out"], again["err"])


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_stops_cleanly_and_loses_nothing(construct, endpoint, built, tmp_path, name):
    endpoint.fault = slowly
    process = start(*flags(endpoint, tmp_path / "run"))
    until(lambda: len(endpoint.asked) > 70)
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "waiting for calls that are out" in err and "Traceback" not in err
    assert not (tmp_path / "run" / "benchmark.jsonl").exists()
    again = construct(*flags(endpoint, tmp_path / "run"))
    assert again["status"] == 0 and "calls were out" not in again["out"], again["err"]
    assert len(endpoint.asked) == len(set(endpoint.asked)) == 26 + 24 * 7
    check_whole(tmp_path / "run", built)


def test_an_interrupt_sends_nothing_that_still_waits(construct, endpoint, built, tmp_path):
    process = start(*flags(endpoint, tmp_path / "run", "--requests_per_minute=15"))
    # One asked for the list of models; reviewers have keys, and so limits, of their own.
    until(lambda: len(endpoint.asked) == 14)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err
    assert len(endpoint.asked) == 14
    assert construct(*flags(endpoint, tmp_path / "run"))["status"] == 0
    assert len(endpoint.asked) == len(set(endpoint.asked)) == 26 + 24 * 7
    check_whole(tmp_path / "run", built)


def test_a_second_interrupt_drops_what_is_out(endpoint, tmp_path):
    released = threading.Event()

    def hang(number, body):
        released.wait(30)

    endpoint.fault = hang
    process = start(*flags(endpoint, tmp_path / "run"))
    until(lambda: len(endpoint.asked) > 5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    released.set()
    assert process.returncode == 130 and "Traceback" not in err


def test_failures_are_named_and_asked_for_again(construct, endpoint, built, tmp_path):
    def refuse(number, body):
        if '"task": "annotate"' in body["messages"][-1]["content"]:
            raise Refusal(503, "the model is loading")

    endpoint.fault = refuse
    more = ("--call_attempts=1",)
    first = construct(*flags(endpoint, tmp_path / "run", *more))
    assert first["status"] == 2
    assert "no sample passed" in first["err"] and "'annotation/http_5xx': 24" in first["err"]
    endpoint.fault = None
    second = construct(*flags(endpoint, tmp_path / "run", *more))
    assert second["status"] == 0, second["err"]
    check_whole(tmp_path / "run", built)
    check_secrets(tmp_path, first["err"], second["out"])


def test_a_budget_stops_the_run_and_a_larger_one_goes_on(construct, endpoint, built, tmp_path):
    more = ("--call_max_tokens=2000",)
    poor = construct(*flags(endpoint, tmp_path / "run", *more, "--budget_tokens=60000"))
    assert poor["status"] == 2 and "the budget is spent (tokens " in poor["err"]
    spent = int(poor["err"].split("(tokens ")[1].split(")")[0].replace(",", ""))
    assert 50_000 < spent <= 60_000
    again = construct(*flags(endpoint, tmp_path / "run", *more, "--budget_tokens=60000"))
    assert again["status"] == 2 and "the budget is spent" in again["err"]
    rich = construct(*flags(endpoint, tmp_path / "run", *more, "--budget_tokens=5000000"))
    assert rich["status"] == 0, rich["err"]
    assert len(set(endpoint.asked)) == len(endpoint.asked)
    check_whole(tmp_path / "run", built)


def test_money_is_counted_by_a_price_table(construct, endpoint, tmp_path):
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({name: {"prompt": 1.0, "completion": 4.0}
                                  for name in MODEL_NAMES}))
    poor = construct(*flags(endpoint, tmp_path / "run", "--call_max_tokens=2000",
                            f"--price_file={prices}", "--budget_money=0.05"))
    assert poor["status"] == 2 and "cost 0.0" in poor["err"]
    prices.write_text(json.dumps({"other": {"prompt": 1.0, "completion": 4.0}}))
    wrong = construct(*flags(endpoint, tmp_path / "run", f"--price_file={prices}"))
    assert wrong["status"] == 2 and "has no price of scripted-generator" in wrong["err"]


def test_stages_run_alone(construct, endpoint, built, tmp_path):
    for stages, calls in (("screening", 26), ("screening,derivation", 24),
                          ("annotation,distractors,composition", 24 * 4), ("assurance", 48)):
        before = len(endpoint.asked)
        done = construct(*flags(endpoint, tmp_path / "run", f"--stages={stages}"))
        assert done["status"] == 0, done["err"]
        assert len(endpoint.asked) - before == calls
    check_whole(tmp_path / "run", built)


def test_one_process_a_folder(construct, endpoint, tmp_path):
    released = threading.Event()
    endpoint.fault = lambda number, body: released.wait(60) and None
    process = start(*flags(endpoint, tmp_path / "run"))
    until(lambda: len(endpoint.asked) > 5)
    second = construct(*flags(endpoint, tmp_path / "run"))
    released.set()
    assert second["status"] == 2 and "in use by another process" in second["err"]
    assert process.wait(60) == 0


MISTAKES = [
    (["--run_dir={tmp}/run"], "--generator_url is needed"),
    (["--stand_in", "--run_dir={tmp}/file/run"], "cannot be written"),
    (["--stand_in", "--run_dir={tmp}/run", "--sources={tmp}/none.jsonl"], "there is no file"),
    (["--stand_in", "--run_dir={tmp}/run", "--sources=alpaca:{tmp}/file"], "none of the formats"),
    (["--stand_in", "--run_dir={tmp}/run", "--field_map=text=x"], "none of the fields"),
    (["--stand_in", "--run_dir={tmp}/run", "--field_map=text"], "field=KEY"),
    (["--stand_in", "--run_dir={tmp}/run", "--stages=screening,tuning"], "'tuning' is none of"),
    (["--stand_in", "--run_dir={tmp}/run", "--min_blocks=7"], "min_blocks=7"),
    (["--stand_in", "--run_dir={tmp}/run", "--prompts_dir={tmp}/none"], "holds no prompt"),
    (["--stand_in", "--run_dir={tmp}/run", "--frozen={tmp}"], "no pipeline is frozen there"),
    (["--stand_in", "--run_dir={tmp}/run", "--budget_money=3"], "needs a --price_file"),
    (["--stand_in", "--run_dir={tmp}/none", "--sources={tmp}/file"], "no row of --sources"),
    (["--stand_in", "--run_dir={tmp}/damaged"], "admission.json is damaged"),
    (["--stand_in", "--run_dir={tmp}/run", "--frozen={tmp}/damaged"], "frozen.json is damaged"),
    (["--generator_url=http://127.0.0.1:9/v1", "--generator_model=m", "--reviewer_models=a,a",
      "--run_dir={tmp}/run"], "are the same"),
    (["--generator_url=http://127.0.0.1:9/v1", "--generator_model=m", "--reviewer_models=a",
      "--run_dir={tmp}/run"], "name two reviewers"),
    (["--generator_url=http://127.0.0.1:9/v1", "--generator_model=m", "--reviewer_models=a,b",
      "--run_dir={tmp}/run"], "cannot use http://127.0.0.1:9/v1"),
    (["--generator_url=https://llm.example/v1", "--generator_model=m", "--reviewer_models=a,b",
      "--run_dir={tmp}/run"], "MEMCALIB_GENERATOR_API_KEY"),
]


def test_mistakes_are_said_plainly(run_program, tmp_path):
    (tmp_path / "file").write_text("x\n")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "admission.json").write_text("{")
    (tmp_path / "damaged" / "frozen.json").write_text("{}")
    answers = run_program("experiments.construct", *(
        [text.format(tmp=tmp_path) for text in arguments] for arguments, _ in MISTAKES))
    for (arguments, message), done in zip(MISTAKES, answers, strict=True):
        assert done["status"] == 2, arguments
        assert done["err"].startswith("error: ") and message in done["err"], arguments
        assert "Traceback" not in done["err"]


def test_other_sources_or_prompts_are_another_run(construct, built, tmp_path):
    folder, _ = built
    (tmp_path / "derive.txt").write_text("Split it.")
    done = construct("--stand_in", f"--run_dir={folder}", f"--prompts_dir={tmp_path}")
    assert done["status"] == 2 and "--pipeline: " in done["err"]


def test_approved_responses_come_with_their_provenance(run_program, built, tmp_path):
    folder, _ = built
    [done] = run_program("experiments.build_sft", [
        "--stand_in", f"--records_file={folder / 'benchmark.jsonl'}",
        f"--run_dir={tmp_path / 'sft'}"])
    assert done["status"] == 0, done["err"]
    records = load_records(folder / "benchmark.jsonl")
    demonstrations = load_demonstrations(tmp_path / "sft" / "responses.jsonl", records)
    assert len(demonstrations) == 24
    for row in rows(tmp_path / "sft" / "responses.jsonl"):
        assert row["provenance"]["generator"] == MODEL_NAMES[0]
        assert row["provenance"]["verifiers"] == list(MODEL_NAMES[1:])
        assert (row["provenance"]["round"], row["provenance"]["rejected"]) == (1, [])


def test_splits_are_disjoint_and_balanced(run_program, built, tmp_path):
    folder, _ = built
    [done] = run_program("experiments.make_splits", [
        f"--records_file={folder / 'benchmark.jsonl'}", f"--output_dir={tmp_path}", "--num_test=6",
        "--num_validation=3", "--num_cold_start=6", "--num_rl=9"])
    assert done["status"] == 0, done["err"]
    test, train = (load_records(tmp_path / f"{name}.jsonl") for name in ("test", "train"))
    assert not {record.id for record in test} & {record.id for record in train}
    assert sorted(record.domain for record in test) == sorted(
        ["coding", "general", "health_seed"] * 2)


def fill_in(folder, failing=0):
    sheet = folder / "sheet.csv"
    lines = list(csv.reader(io.StringIO(sheet.read_text())))
    for number, line in enumerate(lines[1:]):
        line[3:6] = ["no", "derivation", "leaks"] if number < failing else ["yes", "", ""]
    with sheet.open("w", newline="") as file:
        csv.writer(file).writerows(lines)


def test_pilot_rounds_until_the_pipeline_is_frozen(construct, tmp_path):
    pilot = ["--stand_in", "--pilot", "--pilot_size=6", f"--run_dir={tmp_path / 'pilot'}"]
    assert construct(*pilot)["status"] == 0
    assert "fill in" in construct(*pilot)["out"]
    fill_in(tmp_path / "pilot" / "round_1", failing=1)
    assert "5 of 6 samples pass (83%); issues by stage: {'derivation': 1}" in construct(
        *pilot)["out"]
    assert not (tmp_path / "pilot" / "round_2").exists()
    (tmp_path / "derive.txt").write_text("Split it well.")
    pilot.append(f"--prompts_dir={tmp_path}")
    assert "these changed: prompt/derive" in construct(*pilot)["out"]
    batches = [{row["id"] for row in json.loads(
        (tmp_path / "pilot" / name / "samples.json").read_text())}
        for name in ("round_1", "round_2")]
    assert len(batches[0]) == len(batches[1]) == 6 and not batches[0] & batches[1]
    fill_in(tmp_path / "pilot" / "round_2")
    assert "is frozen" in construct(*pilot)["out"]
    build = ["--stand_in", f"--frozen={tmp_path / 'pilot'}", f"--run_dir={tmp_path / 'built'}"]
    refused = construct(*build)
    assert refused["status"] == 2 and "what differs: prompt/derive" in refused["err"]
    assert construct(*build, f"--prompts_dir={tmp_path}")["status"] == 0
    frozen = json.loads((tmp_path / "pilot" / "frozen.json").read_text())["pipeline"]
    assert {(row["provenance"]["pipeline"], row["provenance"]["frozen"])
            for row in rows(tmp_path / "built" / "benchmark.jsonl")} == {(frozen, True)}


def test_a_pilot_takes_more_sources_and_pays_for_no_sample_twice(construct, endpoint, tmp_path):
    good, _ = sample_paths()
    lines = pathlib.Path(good).read_text().splitlines(keepends=True)
    first, more = (tmp_path / name for name in ("first.jsonl", "more.jsonl"))
    first.write_text("".join(lines[:14]))  # None of coding.
    more.write_text("".join(lines[14:]))
    pilot = flags(endpoint, tmp_path / "pilot", "--pilot")
    done = construct(*pilot, "--pilot_size=9", f"--sources={first}")
    assert done["status"] == 2 and "the sources are used up" in done["err"]
    assert "{'health_seed': 3, 'general': 3} of" in done["err"]
    done = construct(*pilot, "--pilot_size=9", f"--sources={more},{first}")
    assert done["status"] == 2 and "is of other sources" in done["err"]
    done = construct(*pilot, "--pilot_size=6", f"--sources={first},{more}")
    assert done["status"] == 0, done["err"]
    round_1 = tmp_path / "pilot" / "round_1"
    asked = len(endpoint.asked)
    assert asked == len(set(endpoint.asked)) == (3 + 3 + 2) * 8
    page = (round_1 / "page.html").read_bytes()
    for name in ("page.html", "sheet.csv"):
        (round_1 / name).unlink()
    done = construct(*pilot, "--pilot_size=6", f"--sources={first},{more}")
    assert done["status"] == 0 and "6 samples are in" in done["out"]
    assert (len(endpoint.asked), (round_1 / "page.html").read_bytes()) == (asked, page)
    (round_1 / "sheet.csv").write_bytes((round_1 / "sheet.csv").read_bytes() + b"\xfc")
    done = construct(*pilot, "--pilot_size=6", f"--sources={first},{more}")
    assert done["status"] == 2 and "sheet.csv is no UTF-8" in done["err"]
    for name in ("samples.json", "pipeline.json"):
        (round_1 / name).write_text("[")
    done = construct(*pilot, "--pilot_size=6", f"--sources={first},{more}")
    assert done["status"] == 2 and "samples.json is damaged" in done["err"]
