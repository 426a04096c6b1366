import hashlib
import os

import pytest

from memcalib_jax.api import ChatSettings
from memcalib_jax.api.cache import ReplyCache, request_key

SETTINGS = ChatSettings("http://127.0.0.1/v1", "m", max_tokens=9)
MESSAGES = [{"role": "user", "content": "é"}]


def test_key_is_the_hash_of_the_canonical_request():
    canonical = (
        '{"max_tokens":9,"messages":[{"content":"\\u00e9","role":"user"}],"model":"m",'
        '"sample_index":2,"temperature":0.0,"thinking":false}'
    )
    expected = hashlib.sha256(canonical.encode()).hexdigest()
    assert request_key(SETTINGS, MESSAGES, 2) == expected
    assert request_key(SETTINGS, [{"content": "é", "role": "user"}], 2) == expected


def test_key_ignores_what_decides_no_reply():
    other = ChatSettings("http://127.0.0.1:81/v1", "m", temperature=0, max_tokens=9, timeout=1.0)
    assert request_key(other, MESSAGES, 0) == request_key(SETTINGS, MESSAGES, 0)
    assert request_key(SETTINGS, MESSAGES, 1) != request_key(SETTINGS, MESSAGES, 0)


def test_a_nucleus_is_part_of_the_key_where_one_is_asked_for():
    asked = ChatSettings("http://127.0.0.1/v1", "m", max_tokens=9, top_p=1)
    canonical = (
        '{"max_tokens":9,"messages":[{"content":"\\u00e9","role":"user"}],"model":"m",'
        '"sample_index":2,"temperature":0.0,"thinking":false,"top_p":1.0}'
    )
    assert request_key(asked, MESSAGES, 2) == hashlib.sha256(canonical.encode()).hexdigest()


def test_an_entry_of_before_ends_for_no_known_reason(tmp_path):
    cache = ReplyCache(tmp_path)
    key = "ab" + "4" * 62
    cache.put(key, "text")
    (tmp_path / "ab" / f"{key}.json").write_text(f'{{"key": "{key}", "text": "text"}}')
    assert cache.get(key) == ("text", None)


def test_entries_are_sharded_and_whole(tmp_path):
    cache = ReplyCache(tmp_path / "new" / "folder")
    key = "ab" + "0" * 62
    assert cache.get(key) is None
    cache.put(key, "text \ud800 \u2028", "length")
    assert cache.get(key) == ("text \ud800 \u2028", "length")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [tmp_path / "new" / "folder" / "ab" / f"{key}.json"]


def test_interrupted_write_leaves_the_old_entry(tmp_path, monkeypatch):
    cache = ReplyCache(tmp_path)
    key = "cd" + "1" * 62
    cache.put(key, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.put(key, "new")
    assert cache.get(key) == ("old", None)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_entry_of_another_key_is_not_taken(tmp_path):
    cache = ReplyCache(tmp_path)
    mine, other = "ef" + "2" * 62, "ef" + "3" * 62
    cache.put(other, "theirs")
    (tmp_path / "ef" / f"{other}.json").rename(tmp_path / "ef" / f"{mine}.json")
    assert cache.get(mine) is None
