"""Pictures of the localization study: figures 3(h), 6 and 7 of arXiv 2609.24259."""

import io
import re

import numpy as np

from memcalib_jax.credit import CHANNELS
from memcalib_jax.evaluation.localization_study import LABELS, UNDER_USE, LabelledPair

_COLORS = ("#c9ced6", "#e9b44c", "#d1694a")
_GROUNDS = (None, "#fbeccb", "#f6cfc2")
_INK, _GREY = "#1f2a44", "#6b7280"
_MARK = 7  # points of what stands behind a sentence


def share_picture(results: dict[str, dict]) -> bytes:
    """Draws (h): shares of tokens and of credit by label, of all pairs and of each channel; a PNG.

    Args:
      results: from `study`.
    """
    figure, canvas = _figure(12.8, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.7))
    overall = results["all"]
    for shift, kind, alpha in ((-0.2, "tokens", 0.45), (0.2, "credit", 1.0)):
        means = np.array([overall[kind][label]["mean"] for label in LABELS])
        bounds = np.array([overall[kind][label]["interval"] for label in LABELS]).T
        bars = left.bar(np.arange(len(LABELS)) + shift, means, 0.38, color=_COLORS, alpha=alpha,
                        yerr=np.maximum(np.abs(bounds - means), 0), capsize=4, ecolor=_INK,
                        error_kw={"lw": 1})
        for bar, mean, high in zip(bars, means, bounds[1]):
            left.annotate(f"{mean:.1f}\n{kind}", (bar.get_x() + bar.get_width() / 2,
                                                  max(mean, high)), (0, 3), ha="center",
                          textcoords="offset points", fontsize=8, color=_INK)
    left.set_xticks(range(len(LABELS)), LABELS)
    left.set_ylim(0, 1.22 * max(overall[kind][label]["interval"][1]
                                for kind in ("tokens", "credit") for label in LABELS))
    _finish(left, f"(h) all {overall['pairs']} pairs, 95% bootstrap intervals")

    names = [name for name in CHANNELS if name in results]
    for place, name in enumerate(names):
        for shift, kind, alpha in ((-0.2, "tokens", 0.45), (0.2, "credit", 1.0)):
            bottom = 0.0
            for label, color in zip(LABELS[::-1], _COLORS[::-1]):
                height = results[name][kind][label]["mean"]
                right.bar(place + shift, height, 0.37, bottom=bottom, color=color, alpha=alpha)
                if height >= 8:
                    right.text(place + shift, bottom + height / 2, f"{height:.0f}", ha="center",
                               va="center", fontsize=7.5, color=_INK)
                bottom += height
    right.set_xticks(range(len(names)), [
        f"{name}\n{results[name]['pairs']} pairs\n{results[name]['top3_hits']} hits"
        for name in names], fontsize=8.5)
    right.set_ylim(0, 100)
    right.legend([_patch(color) for color in _COLORS[::-1]], LABELS[::-1], fontsize=8, ncols=3,
                 frameon=False, loc="lower right", bbox_to_anchor=(1, 0.99))
    _finish(right, "by channel: tokens (pale), then credit")
    return _png(figure)


def case_picture(labelled: LabelledPair, number: int) -> bytes:
    """Draws a pair as figures 6 and 7 do: its memories, then the response sentence by sentence.

    Grounds are the annotator's labels; behind each sentence stand its number, label and share of
    the credit. Returns a PNG.

    Args:
      labelled: the pair.
      number: in the sheet.
    """
    from matplotlib.patches import Rectangle

    pair = labelled.pair
    kind = "under-use" if pair.channel in UNDER_USE else "support"
    title = (f"Pair {number}, {CHANNELS[pair.channel]} ({kind}): response {pair.response} "
             f"in step {pair.step}")
    blocks = [[(title, _INK, None, 11, "bold")], [(pair.question, _INK, None, 9.5, "normal")],
              [("Memories of the channel", _GREY, None, 9, "normal")]]
    blocks += [[(f"\u2022 {text}", _INK, None, 9.5, "normal")] for text in pair.memories]
    blocks += [[("Response", _GREY, None, 9, "normal")], []]
    for place, (sentence, label) in enumerate(zip(pair.sentences, labelled.labels), start=1):
        blocks[-1] += [(sentence.text, _INK, _GROUNDS[label], 9.5, "normal"),
                       (f" [{place} {LABELS[label]} {100 * sentence.credit:.1f}%] ",
                        _COLORS[label] if label else _GREY, None, _MARK, "bold")]
    width = 9.0
    words, height = _flow(blocks, width)
    figure, _ = _figure(width, height)
    for x, y, long, word, color, ground, size, weight in words:
        if ground:
            figure.add_artist(Rectangle((x / width, 1 - (y + 0.06) / height), long / width,
                                        0.2 / height, color=ground, lw=0, zorder=0))
        raised = 0.04 if size == _MARK else 0.0
        figure.text(x / width, 1 - (y - raised) / height, word, color=color, fontsize=size,
                    weight=weight, va="baseline", parse_math=False, zorder=1)
    return _png(figure)


def _flow(blocks, width, margin=0.35, line=0.235, gap=0.1):
    """Places words in lines, in inches from the left and the top.

    Returns:
      (x, y, width, word, color, ground, size, weight) of each word, and the height of all.
    """
    figure, canvas = _figure(1, 1)
    renderer = canvas.get_renderer()
    words, y = [], margin
    for block in blocks:
        x, y = margin, y + line
        for text, color, ground, size, weight in block:
            for word in re.findall(r"\n|[^\S\n]*[^\s]+|[^\S\n]+", text):
                if word == "\n":
                    x, y = margin, y + line
                    continue
                for piece in _pieces(word):
                    long = _inches(figure, renderer, piece, size, weight)
                    if x + long > width - margin and x > margin:
                        x, y = margin, y + line
                        piece = piece.lstrip()
                        long = _inches(figure, renderer, piece, size, weight)
                    if piece:
                        words.append((x, y, long, piece, color, ground, size, weight))
                    x += long
        y += gap
    return words, y + margin


def _pieces(word, most=60):
    """Cuts what is too long for a line, such as a script without spaces."""
    return [word[start:start + most] for start in range(0, len(word), most)]


def _inches(figure, renderer, word, size, weight):
    from matplotlib.font_manager import FontProperties

    long, _, _ = renderer.get_text_width_height_descent(
        word, FontProperties(size=size, weight=weight), False)
    return long / figure.dpi


def _patch(color):
    from matplotlib.patches import Patch

    return Patch(color=color)


def _finish(axes, title):
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_ylabel("% of a pair, mean over pairs")
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e8ec", lw=0.8)
    axes.set_axisbelow(True)


def _figure(width, height):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150)
    if width > 9:
        figure.set_layout_engine("constrained")
    return figure, FigureCanvasAgg(figure)


def _png(figure):
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()
