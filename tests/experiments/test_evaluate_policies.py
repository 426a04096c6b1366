"""Evaluations of policies that are no model on this machine: a chat endpoint, and a file."""

import http.server
import json
import shutil
import threading

import pytest

from memcalib_jax.data import build_messages, load_records

SEEDS = 2
KEY = "a-secret-of-the-policy"


class ChatEndpoint(http.server.ThreadingHTTPServer):
    """Answers with the first memory of a prompt and the number of times it was asked before.

    `refused` is a question that it does not answer.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests, self.refused, self.lock = [], None, threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer(200, {"data": [{"id": "some-policy"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = body["messages"][-1]["content"]
        with self.server.lock:
            before = sum(other["messages"] == body["messages"]
                         for _, other in self.server.requests)
            self.server.requests.append((dict(self.headers), body))
        if self.server.refused and self.server.refused in asked:
            return self._answer(400, {"error": {"message": "content policy"}})
        text = f"{asked.splitlines()[1]} {before}"
        self._answer(200, {
            "choices": [{"message": {"content": text},
                         "finish_reason": "length" if before else "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 5 + 2 * before}})

    def _answer(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def policy():
    with ChatEndpoint() as server, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        patch.setenv("MEMCALIB_POLICY_API_KEY", KEY)
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("policies")


@pytest.fixture(scope="module")
def flags(folder, policy, records_file, judge_url):
    def make(run_dir, **changes):
        values = {
            "policy_url": policy.url, "policy_model": "some-policy", "eval_file": records_file,
            "judge_url": judge_url, "judge_model": "lexical-stand-in", "num_seeds": SEEDS,
            "judge_attempts": 1, "judge_requests_per_minute": 100000,
            "policy_requests_per_minute": 100000, "max_response_tokens": 17,
            "run_dir": folder / run_dir} | changes
        return [f"--{name}={value}" for name, value in values.items() if value is not None]

    return make


@pytest.fixture(scope="module")
def at_endpoint(folder, flags, policy, run_program, records_file):
    """One evaluation; then one whose policy refuses a question; then both again."""
    answers = {}
    answers["whole"], = run_program("experiments.evaluate", flags("whole"))
    answers["first_requests"] = list(policy.requests)
    answers["first_results"] = results_of(folder / "whole")
    shutil.copytree(folder / "whole", folder / "cut")
    (folder / "cut" / "results.json").unlink()
    responses = folder / "cut" / "seed_1" / "responses.jsonl"
    responses.write_text(responses.read_text().splitlines(keepends=True)[0] + '{"id"')
    shutil.copytree(folder / "whole", folder / "uncached")
    (folder / "uncached" / "seed_1" / "responses.jsonl").unlink()
    shutil.rmtree(folder / "uncached" / "policy_cache")

    policy.requests.clear()
    policy.refused = load_records(records_file)[0].question
    answers["refused"], = run_program("experiments.evaluate", flags("refused"))
    answers["refused_results"] = results_of(folder / "refused")
    answers["refused_requests"] = len(policy.requests)
    policy.requests.clear()
    policy.refused = None
    cases = {"healed": flags("refused"), "cut": flags("cut"), "again": flags("whole")}
    answers |= dict(zip(cases, run_program("experiments.evaluate", *cases.values()), strict=True))
    answers["healed_requests"] = len(policy.requests)
    policy.requests.clear()
    answers["uncached"], = run_program("experiments.evaluate", flags("uncached"))
    answers["uncached_requests"] = len(policy.requests)
    return answers


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def of_files(at_endpoint, folder, flags, policy, run_program, tiny_model_dir):
    """Evaluations of the responses of the endpoint as files, and what is refused."""
    rows = [{"id": row["id"], "seed": seed, "response": row["text"]}
            for seed in range(SEEDS) for row in lines(folder / "whole", seed)]
    names = [row["id"] for row in rows[:4]]
    equal = [{"id": name, "seed": seed, "response": "the same text"}
             for name in names for seed in range(SEEDS)]
    changed = {
        "unknown": [*rows, rows[0] | {"id": "nobody"}], "repeated": [*rows, rows[2]],
        "seed": [*rows, rows[0] | {"seed": 2}], "no_seed": rows[:4], "missing": rows[:-1],
        "no_text": [{"id": names[0], "seed": 0}], "bool_seed": [rows[0] | {"seed": True}],
        "equal": equal}

    def of(name, **changes):
        changes = {"policy_url": None, "policy_model": None,
                   "responses_file": write_lines(folder / f"{name}.jsonl", changed[name])
                   if name in changed else folder / "absent"} | changes
        return flags(name, **changes)

    write_lines(folder / "made-elsewhere.jsonl", rows)
    cases = {name: of(name) for name in changed if name != "equal"} | {
        "file": of("file", responses_file=folder / "made-elsewhere.jsonl"),
        "file_again": of("file", responses_file=folder / "made-elsewhere.jsonl"),
        "changed_file": of("file", responses_file=write_lines(folder / "other.jsonl", rows[::-1])),
        "absent": of("absent"),
        "equal": of("equal", judge_temperature=0.7),
        "two": flags("x", responses_file=folder / "made-elsewhere.jsonl"),
        "model_too": flags("x", model_path=tiny_model_dir),
        "run_too": flags("x", checkpoint=folder),
        "nameless": flags("x", policy_model=None),
        "name_alone": flags("x", policy_url=None),
        "away": flags("x", policy_url="http://127.0.0.1:1/v1"),
        "no_base": flags("x", policy_url=policy.url[:-3]),
        "hot": flags("x", temperature=3),
    }
    answers = dict(zip(cases, run_program("experiments.evaluate", *cases.values()), strict=True))
    answers["equal_results"] = results_of(folder / "equal")
    for seed in range(SEEDS):
        (folder / "equal" / f"seed_{seed}" / "judgments.jsonl").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MEMCALIB_POLICY_API_KEY")
        answers["no_key"], answers["rejudged"] = run_program(
            "experiments.evaluate", flags("x", policy_url="https://policy.example/v1"),
            of("equal", judge_temperature=0.7))
    return answers


def results_of(path):
    return json.loads((path / "results.json").read_text())


def lines(path, seed):
    return [json.loads(line)
            for line in (path / f"seed_{seed}" / "responses.jsonl").read_text().splitlines()]


def figures(results):
    return {name: results[name] for name in
            ("seeds", "overall", "by_domain", "channels", "records")}


def test_each_record_is_asked_once_a_seed_as_the_protocol_says(at_endpoint, records_file):
    assert at_endpoint["whole"]["status"] == 0, at_endpoint["whole"]["err"]
    requests = at_endpoint["first_requests"]
    records = load_records(records_file)
    asked = [build_messages(record, representation="fluent") for record in records]
    assert len(requests) == SEEDS * len(records)
    for headers, body in requests:
        assert headers["Authorization"] == f"Bearer {KEY}"
        assert body["messages"] in asked
        assert {name: body[name] for name in body if name != "messages"} == {
            "model": "some-policy", "temperature": 1.0, "top_p": 1.0, "max_tokens": 17,
            "chat_template_kwargs": {"enable_thinking": False}}


def test_responses_and_results_of_an_endpoint(at_endpoint, folder, records_file):
    results = at_endpoint["first_results"]
    assert results["model"] == "some-policy" and results["checkpoint"] is None
    assert results["policy"]["thinking_turned_off_by"] == "chat_template_kwargs"
    assert results["policy"]["statistics"]["completion_tokens"] == 4 * 5 + 4 * 7
    assert [seed["cut_at_limit"] for seed in results["seeds"]] == [0, 4]
    assert [seed["tokens_mean"] for seed in results["seeds"]] == [5.0, 7.0]
    first = {record.id: record.blocks[0].fluent_text for record in load_records(records_file)}
    for seed in range(SEEDS):
        assert {row["id"]: row["text"] for row in lines(folder / "whole", seed)} == {
            name: f"[1] {text} {seed}" for name, text in first.items()}
    assert "Memory use of some-policy, judged by" in at_endpoint["whole"]["out"]


def test_the_key_is_written_nowhere(at_endpoint, folder):
    written = [path for path in (folder / "whole").rglob("*") if path.is_file()]
    assert len(written) > 10
    assert not any(KEY.encode() in path.read_bytes() for path in written)
    assert KEY not in at_endpoint["whole"]["out"] + at_endpoint["whole"]["err"]


def test_a_refused_request_is_an_invalid_response_and_asked_again(at_endpoint, folder):
    assert at_endpoint["refused"]["status"] == 0, at_endpoint["refused"]["err"]
    refused = at_endpoint["refused_results"]
    assert [seed["valid"] for seed in refused["seeds"]] == [3, 3]
    assert [seed["invalid"] for seed in refused["seeds"]] == [{"policy_http_4xx": 1}] * 2
    assert at_endpoint["refused_requests"] == 8 and at_endpoint["healed_requests"] == 2
    healed = results_of(folder / "refused")
    assert [seed["valid"] for seed in healed["seeds"]] == [4, 4]
    assert healed["records"] == results_of(folder / "whole")["records"]


def test_nothing_is_paid_twice(at_endpoint, folder):
    assert at_endpoint["cut"]["status"] == at_endpoint["again"]["status"] == 0
    whole, cut = results_of(folder / "whole"), results_of(folder / "cut")
    assert cut["policy"]["statistics"]["attempts"] == 0
    assert cut["policy"]["statistics"]["cache_hits"] == 3
    assert whole["policy"]["statistics"]["requests"] == 0
    for name in ("overall", "channels", "records"):
        assert cut[name] == whole[name]
    # Why a response ended is in the cache too.
    assert cut["seeds"][1]["cut_at_limit"] == whole["seeds"][1]["cut_at_limit"] == 4
    assert at_endpoint["uncached"]["status"] == 0 and at_endpoint["uncached_requests"] == 4


def test_a_file_of_the_same_responses_comes_to_the_same_figures(of_files, folder):
    assert of_files["file"]["status"] == 0, of_files["file"]["err"]
    results, whole = results_of(folder / "file"), results_of(folder / "whole")
    for name in ("overall", "by_domain", "channels", "records"):
        assert results[name] == whole[name]
    assert results["model"] == "made-elsewhere"
    assert results["seeds"][0]["tokens_mean"] is None
    assert of_files["file_again"]["status"] == 0
    assert results["judge"]["statistics"]["requests"] == 0  # of the run that found all done


def test_records_without_a_response_are_counted_and_named(of_files, folder, records_file):
    assert of_files["missing"]["status"] == 0, of_files["missing"]["err"]
    name = lines(folder / "whole", 1)[-1]["id"]
    assert f"lacks 1 of 4 responses of seed 1, which count as invalid: {name}\n" in (
        of_files["missing"]["out"])
    seeds = results_of(folder / "missing")["seeds"]
    assert [seed["valid"] for seed in seeds] == [4, 3]
    assert seeds[1]["invalid"] == {"missing_response": 1}


@pytest.mark.parametrize("case, message", [
    ("unknown", "line 9: record 'nobody' is not among the records"),
    ("repeated", "has a response of seed 0 on line 3 already"),
    ("seed", "line 9: seed 2 of record"),
    ("no_seed", "has no response of seed 1: lower --num_seeds=2"),
    ("no_text", "line 1: no response; a line is an object such as"),
    ("bool_seed", "line 1: no response"),
    ("absent", "cannot be read: No such file or directory"),
    ("changed_file", "responses_sha256:"),
    ("two", "--policy_url and --responses_file each say who answers: give one"),
    ("model_too", "--model_path and --policy_url each say who answers: give one"),
    ("run_too", "--checkpoint and --policy_url each say who answers: give one"),
    ("nameless", "--policy_url needs --policy_model"),
    ("name_alone", "--policy_model names the model at --policy_url"),
    ("away", "check the address and that the server is running"),
    ("no_base", "must end in /v1"),
    ("no_key", "set the environment variable MEMCALIB_POLICY_API_KEY"),
    ("hot", "temperature must lie in [0, 2]"),
])
def test_mistakes_are_refused(of_files, folder, case, message):
    assert of_files[case]["status"] == 2
    assert of_files[case]["err"].startswith("error: ") and message in of_files[case]["err"]
    assert not (folder / "x" / "config.json").exists()


def test_seeds_have_judgments_of_their_own(of_files, folder):
    statistics = of_files["equal_results"]["judge"]["statistics"]
    assert (statistics["attempts"], statistics["cache_hits"]) == (8, 0)
    assert of_files["rejudged"]["status"] == 0
    again = results_of(folder / "equal")
    assert again["judge"]["statistics"]["attempts"] == 0
    assert again["judge"]["statistics"]["cache_hits"] == 8
    assert figures(again) == figures(of_files["equal_results"])
