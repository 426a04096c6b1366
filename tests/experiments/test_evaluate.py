"""`python -m experiments.evaluate`, from end to end with a tiny model and the lexical stand-in."""

import dataclasses
import hashlib
import http.server
import json
import shutil
import threading

import jax
import numpy as np
import pytest

from memcalib_jax.data import load_records
from memcalib_jax.models import load, load_tokenizer
from memcalib_jax.training.checkpoint import Checkpoints
from memcalib_jax.training.state import OptimizerConfig, init_state

SEEDS = 2


class Refusing(http.server.BaseHTTPRequestHandler):
    """A judge that is there and refuses every request."""

    def do_GET(self):
        self._answer(200, b'{"data": [{"id": "lexical-stand-in"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(400, b'{"error": {"message": "no"}}')

    def _answer(self, status, content):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def refusing_url():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def save_checkpoint(run_dir, params):
    checkpoints = Checkpoints(run_dir / "checkpoints")
    checkpoints.save(3, init_state(params, OptimizerConfig()), {})
    checkpoints.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def flags(folder, tiny_model_dir, records_file, judge_url):
    """Makes the flags of an evaluation; None leaves one out."""
    def make(run_dir, **changes):
        values = {
            "model_path": tiny_model_dir, "eval_file": records_file, "judge_url": judge_url,
            "judge_model": "lexical-stand-in", "judge_attempts": 1, "num_seeds": SEEDS,
            "max_response_tokens": 16, "dtype": "float32", "run_dir": folder / run_dir} | changes
        return [f"--{name}={value}" for name, value in values.items() if value is not None]

    return make


@pytest.fixture(scope="module")
def first(folder, flags, run_program, tiny_model_dir, refusing_url, tmp_path_factory):
    """One process: an evaluation, and what is refused. Answers by name."""
    params = jax.device_get(load(tiny_model_dir)[0])
    save_checkpoint(folder / "other_shape", params | {"embed": np.zeros((7, 32), np.float32)})
    (folder / "broken.jsonl").write_text('{"id": "x"}\n')
    cases = {
        "whole": flags("whole"),
        "other_settings": flags("whole", temperature=0.5),
        "dry_run": [*flags("dry"), "--dry_run"],
        "top_p": flags("new", top_p=0),
        "no_model": flags("new", model_path=folder / "absent"),
        "bad_records": flags("new", eval_file=folder / "broken.jsonl"),
        "all_too_long": flags("new", max_prompt_tokens=5),
        "no_room": flags("new", max_response_tokens=2000),
        "no_run": flags("new", checkpoint=folder / "absent"),
        "other_shape": flags("new", checkpoint=folder / "other_shape"),
        "bad_url": flags("new", judge_url="http://127.0.0.1:1"),
        "no_judge": flags("new", judge_url="http://127.0.0.1:1/v1"),
        "refused": flags("refused", judge_url=refusing_url),
    }
    answers = dict(zip(cases, run_program("experiments.evaluate", *cases.values()), strict=True))
    answers["refused_left_results"] = (folder / "refused" / "results.json").exists()
    return answers


@pytest.fixture(scope="module")
def second(first, folder, flags, run_program, tiny_model_dir):
    """Another process: evaluations that go on where one stopped, and one of a checkpoint."""
    shutil.copytree(folder / "whole", folder / "cut")
    for name in ("results.json", "results.png", "seed_1/judgments.jsonl"):
        (folder / "cut" / name).unlink()
    shutil.rmtree(folder / "cut" / "judge_cache")
    cut_to(folder / "cut" / "seed_0" / "judgments.jsonl", 1)
    cut_to(folder / "cut" / "seed_1" / "responses.jsonl", 1)
    shutil.copytree(folder / "whole", folder / "damaged")
    (folder / "damaged" / "seed_0" / "responses.jsonl").write_text('{"id": "x"}\n')

    params = jax.device_get(load(tiny_model_dir)[0])
    save_checkpoint(folder / "trained", params)
    # Every logit 0: all words are equally likely.
    save_checkpoint(folder / "flat", params | {"final_norm": np.zeros(32, np.float32)})
    cases = {
        "cut": flags("cut"),
        "refused": flags("refused"),
        "damaged": flags("damaged"),
        "more_seeds": flags("whole", num_seeds=SEEDS + 1),
        "trained": flags("of_checkpoint", checkpoint=folder / "trained"),
        "flat": flags("of_flat", checkpoint=folder / "flat"),
    }
    shutil.copytree(folder / "whole", folder / "whole_before")
    return dict(zip(cases, run_program("experiments.evaluate", *cases.values()), strict=True))


def cut_to(path, lines):
    """Leaves the first lines and half of the next, as a crash does."""
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(rows[:lines]) + rows[lines][:len(rows[lines]) // 2])


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def figures(results):
    return {name: results[name] for name in
            ("seeds", "overall", "by_domain", "channels", "macro_accuracy", "records")}


def test_every_record_is_answered_once_a_seed(first, folder, records_file, tiny_model_dir):
    assert first["whole"]["status"] == 0, first["whole"]["err"]
    ids = {record.id: record.domain for record in load_records(records_file)}
    tokenizer = load_tokenizer(tiny_model_dir)
    texts = []
    for seed in range(SEEDS):
        rows = read_lines(folder / "whole" / f"seed_{seed}" / "responses.jsonl")
        assert {row["id"]: row["domain"] for row in rows} == ids and len(rows) == len(ids)
        for row in rows:
            assert row["sample_seed"] == seed
            assert row["finish_reason"] == ("length" if len(row["tokens"]) == 16 else "stop")
            assert row["text"] == tokenizer.decode(row["tokens"], skip_special_tokens=True)
        texts.append([row["text"] for row in rows])
    assert texts[0] != texts[1]


def test_results_follow_from_the_judgments_on_disk(first, folder, records_file):
    records = {record.id: record for record in load_records(records_file)}
    scs, over = [], []
    for seed in range(SEEDS):
        steps = []
        for row in read_lines(folder / "whole" / f"seed_{seed}" / "judgments.jsonl"):
            ideal = {atom.id: atom.ideal for atom in records[row["id"]].atoms}
            steps.append([" ABC".index(atom["level"]) - 1 - ideal.pop(atom["atom_id"])
                          for atom in row["atoms"]])
            assert not ideal
        assert len(steps) == len(records)
        scs.append(100 * sum(0.5 ** sum(map(abs, row)) for row in steps) / len(steps))
        over.append(100 * sum(max(row) > 0 for row in steps) / len(steps))
    results = results_of(folder / "whole")
    overall = results["overall"]
    assert [seed["SCS"] for seed in overall["seeds"]] == pytest.approx(scs)
    assert overall["mean"]["SCS"] == pytest.approx(sum(scs) / 2)
    assert overall["std"]["SCS"] == pytest.approx(abs(scs[0] - scs[1]) / 2 ** 0.5)
    assert overall["mean"]["AOR"] == pytest.approx(sum(over) / 2)
    digest = results["records"].pop("sha256")
    assert results["records"] == {"in_file": 4, "too_long": 0, "answered": 4}
    content = json.dumps([dataclasses.asdict(record) for record in records.values()],
                         sort_keys=True)
    assert digest == hashlib.sha256(content.encode()).hexdigest()
    assert [seed["valid"] for seed in results["seeds"]] == [4, 4]


def test_what_it_writes_and_says(first, folder):
    results, out = results_of(folder / "whole"), first["whole"]["out"]
    assert results["judge"]["model"] == "lexical-stand-in"
    assert results["judge"]["statistics"]["requests"] == 8
    assert results["settings"]["num_seeds"] == SEEDS and results["checkpoint"] is None
    assert "NO REAL JUDGMENTS" in results["note"] and results["note"] in out
    assert "generated 8/8  judged 8/8" in out
    assert f"{results['overall']['mean']['SCS']:.2f} ±" in out
    assert (folder / "whole" / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("case, message", [
    ("other_settings", "--temperature: 1.0 there, 0.5 now"),
    ("top_p", "--top_p must be in (0, 1]"),
    ("no_model", "absent: there is no such file or folder"),
    ("bad_records", "broken.jsonl, line 1, record 'x'"),
    ("all_too_long", "no prompt is within --max_prompt_tokens=5"),
    ("no_room", "exceeds the model's 2048 positions"),
    ("no_run", "holds no whole checkpoint"),
    ("other_shape", "parameters of another shape than --model_path="),
    ("bad_url", "/v1"),
    ("no_judge", "check the address and that the server is running"),
])
def test_mistakes_are_refused_before_anything_is_done(first, folder, case, message):
    assert first[case]["status"] == 2
    assert first[case]["err"].startswith("error: ") and message in first[case]["err"]
    assert {path.name for path in (folder / "new").glob("*")} <= {"judge_cache"}


def test_a_dry_run_only_checks(first, folder):
    assert first["dry_run"]["status"] == 0
    assert "4 prompts x 2 seeds; all checks passed" in first["dry_run"]["out"]
    assert {path.name for path in (folder / "dry").glob("*")} <= {"judge_cache"}


def test_without_a_valid_response_there_are_no_results(first):
    assert first["refused"]["status"] == 2
    assert "seed 0: none of 4 responses has a valid judgment (4 x http_4xx)" in (
        first["refused"]["err"])
    assert not first["refused_left_results"]


def test_failed_judgments_are_asked_again(second, folder):
    assert second["refused"]["status"] == 0, second["refused"]["err"]
    assert figures(results_of(folder / "refused")) == figures(results_of(folder / "whole_before"))


def test_an_evaluation_that_was_cut_off_comes_to_the_same_figures(second, folder):
    assert second["cut"]["status"] == 0, second["cut"]["err"]
    for seed in range(SEEDS):
        was, now = ({row["id"]: row for row in
                     read_lines(folder / run / f"seed_{seed}" / "responses.jsonl")}
                    for run in ("whole_before", "cut"))
        assert now == was
    cut, whole = results_of(folder / "cut"), results_of(folder / "whole_before")
    assert figures(cut) == figures(whole)
    # One judgment of the eight was left.
    assert cut["judge"]["statistics"]["requests"] == 7


def test_another_seed_adds_to_those_that_are_there(second, folder):
    assert second["more_seeds"]["status"] == 0, second["more_seeds"]["err"]
    before, after = (results_of(folder / run)["overall"]["seeds"]
                     for run in ("whole_before", "whole"))
    assert len(after) == SEEDS + 1 and after[:SEEDS] == before


def test_a_file_that_is_none_of_ours_is_refused(second, folder):
    assert second["damaged"]["status"] == 2
    assert "responses.jsonl: a line lacks one of" in second["damaged"]["err"]
    assert (folder / "damaged" / "seed_0" / "responses.jsonl").read_text() == '{"id": "x"}\n'


def test_a_checkpoint_gives_the_parameters(second, folder):
    assert second["trained"]["status"] == 0, second["trained"]["err"]
    results = results_of(folder / "of_checkpoint")
    assert results["checkpoint"] == {"run": str(folder / "trained"), "step": 3}
    assert figures(results) == figures(results_of(folder / "whole_before"))
    assert second["flat"]["status"] == 0, second["flat"]["err"]
    tokens = [[row["tokens"] for row in read_lines(folder / run / "seed_0" / "responses.jsonl")]
              for run in ("whole_before", "of_checkpoint", "of_flat")]
    assert tokens[0] == tokens[1] != tokens[2]
