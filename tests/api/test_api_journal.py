import asyncio
import json
import multiprocessing
import os

import pytest

from memcalib_jax.api.journal import CallJournal, read_journal


def test_no_file_tells_nothing(tmp_path):
    past = read_journal(tmp_path / "none")
    assert (past.open_keys, past.kept, dict(past.prompt_tokens)) == (set(), set(), {})


def test_what_a_journal_tells(tmp_path):
    journal = CallJournal(tmp_path / "new" / "journal.jsonl")
    for key in ("good", "bad", "failed", "open", "again"):
        journal.intent(key, "m")
    journal.reply("good", "m", kept=True, prompt_tokens=10, completion_tokens=3)
    journal.reply("bad", "m", kept=False, prompt_tokens=5, completion_tokens=2)
    journal.failure("failed", "timeout")
    journal.failure("again", "http_5xx")
    journal.intent("again", "n")
    journal.close()
    past = read_journal(tmp_path / "new" / "journal.jsonl")
    assert past.open_keys == {"open", "again"} and past.kept == {"good"}
    assert (past.prompt_tokens["m"], past.completion_tokens["m"]) == (15, 5)


def test_a_cut_line_spoils_no_other(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'\n{"event": "intent", "key": "a", "mo')
    journal = CallJournal(path)
    journal.intent("b", "m")
    journal.close()
    assert read_journal(path).open_keys == {"b"}


def _write(path, name, count):
    journal = CallJournal(path)
    for number in range(count):
        journal.intent(f"{name}-{number}", "m" * 50)


def test_processes_share_a_file(tmp_path):
    path = tmp_path / "journal.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, name, 300)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert len(read_journal(path).open_keys) == 600


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_said(tmp_path):
    with pytest.raises(OSError, match="No space left"):
        CallJournal("/dev/full").intent("k", "m")


def events(folder):
    lines = (folder / "journal.jsonl").read_text().split("\n")
    return [json.loads(line) for line in lines if line]


def test_a_client_notes_every_call(endpoint, open_client, steps, tmp_path):
    endpoint.script = [(500, "oops"), (200, steps.completion("")), steps.reset,
                       (200, steps.completion("fine", usage={"prompt_tokens": 4,
                                                             "completion_tokens": 2}))]
    client = open_client("sk-key", cache_dir=tmp_path)
    asyncio.run(client.complete([{"role": "user", "content": "x"}]))
    assert [(event["event"], event.get("kind"), event.get("kept")) for event in events(tmp_path)] \
        == [("intent", None, None), ("failure", "http_5xx", None),
            ("intent", None, None), ("reply", None, False),
            ("intent", None, None), ("failure", "network", None),
            ("intent", None, None), ("reply", None, True)]
    assert len({event["key"] for event in events(tmp_path)}) == 1
    assert "sk-key" not in (tmp_path / "journal.jsonl").read_text()


def test_a_call_that_is_given_up_is_noted(endpoint, open_client, steps, tmp_path):
    endpoint.script = [steps.hang]

    async def run():
        client = open_client(cache_dir=tmp_path)
        task = asyncio.create_task(client.complete([{"role": "user", "content": "x"}]))
        while not endpoint.requests:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert [event.get("kind") for event in events(tmp_path)] == [None, "cancelled"]
