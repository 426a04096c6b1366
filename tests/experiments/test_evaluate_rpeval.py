"""`python -m experiments.evaluate_rpeval`, with a tiny model and the lexical stand-in."""

import http.server
import json
import threading

import pytest

from memcalib_jax.judge.server import MODEL_NAME, stand_in_reply

# Words of the tiny model's own vocabulary, so that responses can be found to use them.
RECORDS = [
    {"question": "What now?", "persona": ["the user takes the bus", "the user has a dog"],
     "intent_type": "CA"},
    {"question": "And then?", "persona": ["the user drinks tea", "the team", "a week of work"],
     "intent_type": "ABA"},
]


@pytest.fixture(scope="module")
def asked():
    """A judge that notes what it is asked; `asked["url"]`, `asked["bodies"]`."""
    bodies = []

    class Noting(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer({"data": [{"id": MODEL_NAME}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            self._answer({"choices": [{"index": 0, "finish_reason": "stop", "message": {
                "role": "assistant", "content": stand_in_reply(body["messages"])}}]})

        def _answer(self, value):
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Noting) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield {"url": f"http://127.0.0.1:{server.server_port}/v1", "bodies": bodies}
        server.shutdown()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model_dir, run_program, asked):
    folder = tmp_path_factory.mktemp("rpeval")
    (folder / "multi.json").write_text(json.dumps(RECORDS))
    (folder / "wrong.json").write_text(json.dumps([RECORDS[0] | {"intent_type": "C"}]))

    def flags(run_dir, **changes):
        values = {"model_path": tiny_model_dir, "eval_file": folder / "multi.json",
                  "judge_url": asked["url"], "judge_model": MODEL_NAME, "num_seeds": 2,
                  "max_response_tokens": 16, "dtype": "float32", "run_dir": folder / run_dir}
        return [f"--{name}={value}" for name, value in (values | changes).items()]

    cases = {"whole": flags("whole"), "again": flags("whole"),
             "wrong": flags("wrong", eval_file=folder / "wrong.json"),
             "dry": [*flags("dry"), "--dry_run"]}
    answers = run_program("experiments.evaluate_rpeval", *cases.values())
    return folder, dict(zip(cases, answers, strict=True))


def test_results_follow_from_the_judgments_on_disk(runs):
    folder, answers = runs
    assert answers["whole"]["status"] == 0, answers["whole"]["err"]
    results = json.loads((folder / "whole" / "results.json").read_text())
    targets = {f"rpeval-{number}": row["intent_type"] for number, row in enumerate(RECORDS, 1)}
    for seed in range(2):
        rows = [json.loads(line) for line in (
            folder / "whole" / f"seed_{seed}" / "judgments.jsonl").read_text().splitlines()]
        pairs = [(target, atom["level"]) for row in rows
                 for target, atom in zip(targets[row["id"]], row["atoms"], strict=True)]
        assert len(rows) == 2 and len(pairs) == 5
        micro = 100 * sum(target == level for target, level in pairs) / 5
        assert results["overall"]["seeds"][seed]["Micro"] == pytest.approx(micro)
    assert len(results["records"].pop("sha256")) == 64
    assert results["records"] == {"in_file": 2, "too_long": 0, "answered": 2}
    assert results["format"] == "memcalib_jax.rpeval/1"
    assert results["settings"]["judge_temperature"] == 1.0
    assert "NO REAL JUDGMENTS" in results["note"] and results["note"] in answers["whole"]["out"]
    assert f"{results['overall']['mean']['Macro']:.2f} ±" in answers["whole"]["out"]


def test_the_judge_is_blind_and_draws_at_temperature_1(runs, asked):
    assert len(asked["bodies"]) == 4
    for body in asked["bodies"]:
        payload = json.loads(body["messages"][-1]["content"])
        assert body["temperature"] == 1.0
        assert all(set(atom) == {"atom_id", "text"} for atom in payload["atoms"])
        assert body["messages"][0]["content"].startswith("You measure how far a user's stored")


def test_the_same_command_asks_nothing_again(runs):
    _, answers = runs
    assert answers["again"]["status"] == 0
    tables = [answers[run]["out"].split("RPEval: ")[1] for run in ("whole", "again")]
    assert tables[0] == tables[1]


def test_mistakes_and_dry_runs(runs):
    folder, answers = runs
    assert answers["wrong"]["status"] == 2
    assert "record 'rpeval-1', field [0].intent_type" in answers["wrong"]["err"]
    assert not (folder / "wrong").exists()
    assert "2 prompts x 2 seeds; all checks passed" in answers["dry"]["out"]
    assert not (folder / "dry" / "results.json").exists()
