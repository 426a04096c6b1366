import errno
import os

import pytest

from memcalib_jax.construction.journal import FAILED, KEPT, REJECTED, Journal
from memcalib_jax.jsonlines import DamagedFile


def test_decisions_come_back(tmp_path):
    path = tmp_path / "new" / "1_x.jsonl"
    journal = Journal(path)
    journal.write("a", KEPT, added={"text": "ü \ud800"})
    journal.write("b", REJECTED, reason="no", detail="because")
    journal.write("c", FAILED, reason="timeout", detail="slow")
    journal.write("c", KEPT, added={"n": 1})
    journal.close()
    again = Journal(path)
    assert {name: (row.kind, row.reason) for name, row in again.decisions.items()} == {
        "a": (KEPT, ""), "b": (REJECTED, "no"), "c": (KEPT, "")}
    assert again.added("a") == {"text": "ü \ud800"} and again.added("c") == {"n": 1}
    assert again.detail("b") == "because"
    assert again.counts() == {(KEPT, ""): 2, (REJECTED, "no"): 1}


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_cut_last_line_is_dropped_and_replaced(tmp_path, cut):
    path = tmp_path / "1_x.jsonl"
    journal = Journal(path)
    journal.write("a", KEPT, added={})
    journal.write("b", KEPT, added={"text": "long enough to be cut"})
    journal.close()
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(path)
    assert set(again.decisions) == {"a"}
    again.write("b", REJECTED, reason="no")
    again.close()
    assert Journal(path).decisions["b"].kind == REJECTED


@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b'{"id": "a"}\n',
                                  b'{"id": "a", "decision": "kept"}\n',
                                  b'{"id": "a", "decision": "kept", "added": 5}\n',
                                  b'{"id": "a", "decision": "lost", "reason": ""}\n',
                                  b'{"id": 3, "decision": "rejected", "reason": ""}\n'])
def test_a_damaged_line_is_named(tmp_path, line):
    (tmp_path / "x.jsonl").write_bytes(line)
    with pytest.raises(DamagedFile, match="x.jsonl, line 1: no decision"):
        Journal(tmp_path / "x.jsonl")


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "x.jsonl")
    journal.write("a", KEPT, added={})
    whole, write = (tmp_path / "x.jsonl").read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:7]))
    with pytest.raises(OSError) as caught:
        journal.write("b", KEPT, added={})
    assert caught.value.errno == errno.ENOSPC and "b" not in journal.decisions
    monkeypatch.undo()
    assert (tmp_path / "x.jsonl").read_bytes() == whole
    journal.write("b", KEPT, added={"n": 2})
    assert Journal(tmp_path / "x.jsonl").added("b") == {"n": 2}
