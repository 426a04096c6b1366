"""Thousands of judgments against an endpoint that fails a third of the time: nothing is lost."""

import json
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import contextmanager

from memcalib_jax.api import FAILURE_KINDS

HERE = pathlib.Path(__file__).parent
COUNT, CONCURRENCY, SECRET = 2000, 64, "sk-secret-of-the-run-42"


@contextmanager
def faulty_judge(seed=3, share=0.3):
    process = subprocess.Popen([sys.executable, HERE / "faulty_judge.py", str(seed), str(share)],
                               stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def judge_many(url, folder, name, count=COUNT):
    return subprocess.Popen(
        [sys.executable, HERE / "judge_many.py", f"{url}/v1", folder / "cache", folder / name,
         str(count)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=HERE.parents[1], env={"PATH": "", "PYTHONPATH": str(HERE.parents[1]),
                                  "MEMCALIB_JUDGE_API_KEY": SECRET})


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


def outcomes(folder, name):
    lines = (folder / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


def seen_by(url):
    with urllib.request.urlopen(f"{url}/seen") as answer:
        return json.load(answer)


def check_ends(rows, count=COUNT):
    """Every request ended once, as a right judgment or a named failure."""
    assert sorted(row[0] for row in rows) == list(range(count))
    for number, valid, right, reason in rows:
        if valid:
            assert right and reason is None
        else:
            assert re.match(r"\w+", reason)[0] in FAILURE_KINDS, reason
    return {row[0] for row in rows if row[1]}


def check_journal(folder):
    """No call was made for a request after its good reply was written down."""
    kept, again = set(), []
    for line in (folder / "cache" / "journal.jsonl").read_text().split("\n"):
        if not line:
            continue
        event = json.loads(line)
        if event["event"] == "intent" and event["key"] in kept:
            again.append(event["key"])
        if event["event"] == "reply" and event["kept"]:
            assert event["key"] not in kept
            kept.add(event["key"])
    assert again == []
    return kept


def check_paid_once(seen, told):
    """A good reply went out twice only where the first came too late for the client."""
    timeouts = sum(each["stats"]["failed_attempts"]["timeout"] for each in told)
    late = timeouts - seen["faults"].get("slow", 0)
    assert sum(count - 1 for count in seen["good"].values()) <= late


def check_secret(folder):
    for path in folder.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_every_request_ends_once_and_memory_stays(tmp_path):
    with faulty_judge() as url:
        told = finish(judge_many(url, tmp_path, "outcomes"))
        seen = seen_by(url)
    valid = check_ends(outcomes(tmp_path, "outcomes"))
    assert len(valid) == len(check_journal(tmp_path)) > 0.97 * COUNT
    assert set(seen["faults"]) == {"", *"429 500 503 slow drop cut malformed wrong_atom twice "
                                        "empty html".split()}
    assert 0.25 < 1 - seen["faults"][""] / sum(seen["faults"].values()) < 0.35
    assert set(seen["good"]) == {str(number) for number in valid}
    check_paid_once(seen, [told])
    assert seen["most"] <= CONCURRENCY + 1
    early, late = told["memory"][2:6], told["memory"][-4:]
    assert sum(late) / 4 - sum(early) / 4 < 12.0  # MiB
    assert sum(told["stats"]["failed_attempts"].values()) > 500
    check_secret(tmp_path)


def test_a_killed_run_goes_on_without_asking_again(tmp_path):
    with faulty_judge(seed=4) as url:
        killed = judge_many(url, tmp_path, "first")
        while sum(seen_by(url)["good"].values()) < COUNT // 3:
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=20)
        kept_before = check_journal(tmp_path)
        finish(judge_many(url, tmp_path, "second"))
        seen = seen_by(url)
    first = outcomes(tmp_path, "first")
    assert 0 < len(first) < COUNT and len(kept_before) >= sum(row[1] for row in first)
    check_ends(outcomes(tmp_path, "second"))
    check_journal(tmp_path)
    # Paid twice at most: what was out, answered and not yet written down when the process died.
    assert sum(count - 1 for count in seen["good"].values()) <= 2 * CONCURRENCY
    check_secret(tmp_path)


def test_two_processes_share_a_cache_and_one_asks(tmp_path):
    count = 700
    with faulty_judge(seed=5) as url:
        both = [judge_many(url, tmp_path, name, count) for name in ("one", "other")]
        told = [finish(process) for process in both]
        seen = seen_by(url)
    valid = [check_ends(outcomes(tmp_path, name), count) for name in ("one", "other")]
    kept = check_journal(tmp_path)
    assert len(kept) == len(seen["good"]) == len(valid[0] | valid[1])
    check_paid_once(seen, told)
    hits = sum(each["stats"]["cache_hits"] for each in told)
    assert hits >= len(valid[0] & valid[1])
    assert seen["most"] <= 2 * (CONCURRENCY + 1)


def test_an_endpoint_that_only_fails_names_every_failure(tmp_path):
    with faulty_judge(seed=6, share=1.0) as url:
        finish(judge_many(url, tmp_path, "outcomes", 100))
    rows = outcomes(tmp_path, "outcomes")
    assert check_ends(rows, 100) == set()
    reasons = Counter(re.match(r"\w+", row[3])[0] for row in rows)
    assert reasons.keys() >= {"rate_limit", "http_5xx", "network", "parse", "empty", "timeout"}
