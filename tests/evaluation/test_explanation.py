import html.parser
import re

import numpy as np
import pytest
from made_traces import traced

from memcalib_jax.credit import CHANNELS
from memcalib_jax.evaluation.explanation import explain, page, shades, shown, terminal


class Reader(html.parser.HTMLParser):
    """Collects spans (title, style, text) and checks that elements are closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.spans, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [attrs[name] for name in ("src", "href") if name in attrs]
        if tag == "meta":
            return
        self.open.append(tag)
        if tag == "span" and "title" in attrs:
            self.spans.append([attrs["title"], attrs["style"], ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "span" and self.spans:
            self.spans[-1][2] += data


def read(text):
    reader = Reader()
    reader.feed(text)
    assert not reader.open and not reader.links and "url(" not in text and "@import" not in text
    return reader


def longest_localized(trace):
    return max(trace.pair_response_S[trace.localized_S].tolist(), key=trace.length_R.__getitem__)


@pytest.mark.parametrize("settings", [
    {}, {"granularity": "sentence", "stops": True}, {"mode": "absolute"}, {"method": "gdpo"},
    {"mode": "guarded", "stops": True}])
def test_the_channels_add_up_to_the_tokens_advantages(settings):
    trace = traced(**settings)
    moved = 0
    for response in np.flatnonzero(trace.valid_R):
        total, *parts = explain(trace, response).parts
        np.testing.assert_allclose(
            sum(part.added_T for part in parts), total.added_T, atol=2e-6)
        for part in parts:
            pair = trace.pair_of(response, part.channel)
            localized = pair is not None and bool(trace.localized_S[pair])
            assert (np.ptp(part.added_T) > 1e-9) == (localized and len(part.added_T) > 1)
            moved += localized
            assert part.title.startswith(CHANNELS[part.channel] + " ")
    assert moved > 4 or settings == {"method": "gdpo"}


def test_a_guarded_run_says_why_a_token_is_no_candidate():
    trace = traced(mode="guarded", stops=True)
    said = set()
    for response in np.flatnonzero(trace.valid_R):
        right = [pair for pair in (trace.pair_of(response, 4), trace.pair_of(response, 8))
                 if pair is not None]
        supported = np.any([trace.score_of(pair) > 0 for pair in right], axis=0)
        for part in explain(trace, response).parts[1:]:
            barred = ["no candidate: " in details for details in part.details_T]
            said |= {details.split("no candidate: ")[1].split("\n")[0]
                     for details in part.details_T if "no candidate: " in details}
            if part.channel in (3, 6, 7) and trace.pair_of(response, part.channel) is not None:
                stop = trace.stop_N[trace.tokens_of(response)]
                assert barred == (stop | supported).tolist()
            else:
                assert not any(barred)
    assert said == {"a stop token", "supported by B+", "supported by C+"}


def test_the_page_tells_each_tokens_numbers():
    trace = traced()
    response = longest_localized(trace)
    explanation = explain(trace, response)
    reader = read(page(explanation))
    coloured = [part for part in explanation.parts
                if part.channel is None or np.ptp(part.added_T) > 1e-9]
    length = trace.length_R[response]
    assert len(reader.spans) == length * len(coloured) > length
    for part, first in zip(coloured, range(0, len(reader.spans), length)):
        spans = reader.spans[first:first + length]
        assert "".join(text for _, _, text in spans[:-1]) == trace.responses[response]["text"]
        strongest = int(np.abs(part.added_T).argmax())
        colour = "29,101,216" if part.added_T[strongest] > 0 else "214,40,40"
        assert spans[strongest][1] == f"background:rgba({colour},0.750)"
        for (title, _, _), added in zip(spans, part.added_T):
            words = "advantage" if part.channel is None else "adds"
            value, = re.findall(rf"^{words} ([+-][\d.]+)$", title, re.MULTILINE)
            assert float(value) == pytest.approx(added, abs=6e-5)
    pair = trace.pair_of(response, coloured[1].channel)
    title = reader.spans[length + 3][0]
    assert f"d {trace.difference_of(pair)[3]:+.4f} nats" in title
    assert f"multiplier {trace.multiplier_of(pair)[3]:.4f}" in title
    assert f"score q {trace.score_of(pair)[3]:.4f}" in title


def test_texts_that_html_could_take_for_its_own():
    trace = traced()
    trace.records[0]["question"] = "<script>alert('x')</script> & \ud800"
    trace.records[0]["atoms"][0]["text"] = "</section><b>"
    trace.responses[0]["text"] = '"<b>'
    trace.token_end_N[trace.tokens_of(0)] = 4
    text = page(explain(trace, 0))
    assert "<script" not in text and "<b>" not in text
    text.encode()
    assert read(text).spans[0][2] == '"<b>'


def test_a_response_without_judgment():
    trace = traced()
    explanation = explain(trace, trace.find("r1/2"))
    assert len(explanation.parts) == 1 and not explanation.parts[0].added_T.any()
    assert ("not judged", "timeout: 300 s") in explanation.facts
    assert "ideal Ignore  judged ?" in terminal(explanation, colored=False)
    read(page(explanation))


def test_the_terminal_with_and_without_colours():
    trace = traced()
    response = longest_localized(trace)
    explanation = explain(trace, response)
    plain = terminal(explanation, colored=False)
    assert "\x1b" not in plain
    best = int(np.abs(explanation.parts[0].added_T).argmax())
    assert f"{explanation.parts[0].added_T[best]:+.4f}  token {best:<5} " in plain
    colored = terminal(explanation, colored=True)
    assert trace.responses[response]["text"] in re.sub(r"\x1b\[[\d;]*m", "", colored)
    assert colored.count("\x1b[38") == colored.count("\x1b[0m") > 0


def test_control_characters_do_not_reach_the_terminal():
    trace = traced()
    trace.responses[0]["text"] = "\x1b[2J\x07x"
    trace.token_end_N[trace.tokens_of(0)] = 6
    text = terminal(explain(trace, 0), colored=True)
    assert "\x1b[2J" not in text and "\x07" not in text


def test_shades_and_signs():
    assert shades([1.0, -2.0, 0.5]).tolist() == [0.5, -1.0, 0.25]
    assert shades([0.0, 0.0]).tolist() == [0.0, 0.0] and shades([]).tolist() == []
    assert [shown(text) for text in (" a\n", "\n\n", "", " ")] == [
        " a\n", "\u21b5\n\u21b5\n", "\u25a1", " "]
