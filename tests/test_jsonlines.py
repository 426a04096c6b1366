"""Rows on disk, one JSON object a line."""

import pytest

from memcalib_jax.jsonlines import JsonLines


def written(path, *rows):
    lines = JsonLines(path)
    for row in rows:
        lines.append(row)
    lines.close()


def read(path):
    lines = JsonLines(path)
    lines.close()
    return lines.rows


@pytest.mark.parametrize("text", ["plain", "gr\u00fc\u00df \u7d75 \U0001f375", "half \ud83d",
                                  "line\u2028end\x85\r\n"])
def test_any_text_comes_back(tmp_path, text):
    written(tmp_path / "rows.jsonl", {"text": text}, {"text": ""})
    assert read(tmp_path / "rows.jsonl") == [{"text": text}, {"text": ""}]


def test_a_line_that_was_cut_off_is_dropped_and_written_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2')
    written(path, {"n": 3})
    assert path.read_bytes() == b'{"n": 1}\n{"n": 3}\n'


@pytest.mark.parametrize("line", [b"[1]", b"x", b"\xff"])
def test_a_whole_line_that_is_no_object_is_refused(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: no JSON object"):
        JsonLines(path)
