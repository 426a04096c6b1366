"""Pictures of a run's dynamics: figure 3 (b) to (g) of arXiv 2609.24259."""

import io
from collections.abc import Sequence

import numpy as np

from memcalib_jax.credit import CHANNELS
from memcalib_jax.evaluation.dynamics import (
    OUTCOMES,
    PERCENTILES,
    StepFigures,
    centred_mean,
    rates,
    thirds,
)

_COLORS = {"correct use": "#1b8a5a", "over-use": "#d1495b", "under-use": "#2e6fbb",
           "corrective": "#7a5195"}
# Shades of the channel's group, and a dash of its own.
_CHANNEL_STYLES = {
    4: ("#1b8a5a", "-"), 8: ("#74c69d", "-"), 1: ("#8f1d2f", "-"), 2: ("#d1495b", "--"),
    5: ("#f2a65a", "-."), 3: ("#1d3f72", "-"), 6: ("#2e6fbb", "--"), 7: ("#7fb2e5", "-.")}
_OUTCOME_COLORS = ("#2a9d8f", "#e9c46a", "#c9ced6", "#c1443c")
_GREY = "#5b6472"


def outcome_picture(figures: Sequence[StepFigures]) -> bytes:
    """Draws (b) trigger rates by channel and (c) localization rates by third; returns a PNG."""
    figure, (left, right) = _figure()
    series = _series(figures)
    for channel in _CHANNEL_STYLES:
        _line(left, series, f"{CHANNELS[channel]} triggered", CHANNELS[channel],
              *_CHANNEL_STYLES[channel])
    _finish(left, "(b) trigger rate, seven-step mean", "% of valid responses")
    _label_ends(left)

    parts = thirds(figures)
    for place, (name, color) in enumerate(_COLORS.items()):
        heights = [rates(chosen)[f"{name} localized"] for chosen in parts.values()]
        bars = right.bar(np.arange(len(parts)) + (place - 1.5) * 0.2, np.nan_to_num(heights), 0.18,
                         color=color, label=name)
        right.bar_label(bars, [_short(height) for height in heights], fontsize=8, padding=2)
    _by_third(right, parts)
    right.set_ylim(0, 112)
    right.legend(ncols=4, fontsize=8, frameon=False, loc="upper center", columnspacing=1,
                 handlelength=1)
    _finish(right, "(c) localized share of candidates", "% of (response, channel) pairs",
            ticks=False)
    return _png(figure)


def variation_picture(figures: Sequence[StepFigures]) -> bytes:
    """Draws (d) groups whose rewards vary and entropy, and (e) groups' outcomes; a PNG."""
    figure, (left, right) = _figure()
    series = _series(figures)
    for name in ("correct use", "over-use", "under-use"):
        _line(left, series, f"{name} non-degenerate", name, _COLORS[name], "-")
    entropy = left.twinx()
    _line(entropy, series, "entropy", "entropy (right)", _GREY, ":")
    entropy.set_ylabel("entropy, nats", color=_GREY)
    entropy.spines["top"].set_visible(False)
    entropy.margins(y=0.3)
    left.set_ylim(bottom=0)
    handles = left.get_lines() + entropy.get_lines()
    left.legend(handles, [line.get_label() for line in handles], fontsize=8, frameon=False,
                ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    _finish(left, "(d) non-degenerate groups and entropy, seven-step mean", "% of prompts")

    parts, labels, bottoms = thirds(figures), [], None
    columns = [(group, phase, rates(chosen)) for group in ("correct use", "over-use", "under-use")
               for phase, chosen in parts.items()]
    places = np.array([place + 0.6 * (place // len(parts)) for place in range(len(columns))])
    bottoms = np.zeros(len(columns))
    for outcome, color in zip(OUTCOMES, _OUTCOME_COLORS):
        heights = np.nan_to_num([values[f"{group} {outcome}"] for group, _, values in columns])
        right.bar(places, heights, 0.86, bottom=bottoms, color=color, label=outcome)
        for place, height, bottom in zip(places, heights, bottoms):
            if height >= 7:
                right.text(place, bottom + height / 2, f"{height:.0f}", ha="center", va="center",
                           fontsize=8, color="white" if color in _OUTCOME_COLORS[::3] else "#222")
        bottoms += heights
    labels = [f"{phase}\n{group}" if index % len(parts) == len(parts) // 2 else f"{phase}\n"
              for index, (group, phase, _) in enumerate(columns)]
    right.set_xticks(places, labels, fontsize=8)
    right.tick_params(length=0)
    right.legend(ncols=4, fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, -0.3),
                 columnspacing=1, handlelength=1)
    right.set_ylim(0, 100)
    _finish(right, "(e) rewards of a group (without prompts that lack\nan atom of the ideal level)",
            "% of groups", ticks=False)
    return _png(figure)


def credit_picture(figures: Sequence[StepFigures]) -> bytes:
    """Draws (f) thresholds and (g) effective multipliers by sentence; returns a PNG."""
    figure, (left, right) = _figure()
    series = _series(figures)
    for channel in _CHANNEL_STYLES:
        _line(left, series, f"{CHANNELS[channel]} threshold", CHANNELS[channel],
              *_CHANNEL_STYLES[channel])
    left.set_ylim(0, 1.15 * left.get_ylim()[1])
    _finish(left, "(f) thresholds, seven-step mean", "nats")
    _label_ends(left)

    steps = series["step"]
    low, high, highest = (centred_mean(steps, series[f"multiplier p{p}"]) for p in PERCENTILES)
    right.fill_between(steps, low, high, color="#2e6fbb", alpha=0.2, lw=0,
                       label="5th to 95th percentile")
    _line(right, series, "multiplier p99", "99th percentile", "#f2a65a", "--")
    _line(right, series, "multiplier mean", "token-weighted mean", "#1d3f72", "-")
    if np.isfinite(highest).any():
        right.set_ylim(0, 1.4 * np.nanmax(highest))
    right.legend(fontsize=8, frameon=False, loc="upper left")
    _finish(right, "(g) effective multiplier by sentence, seven-step mean", "multiplier")
    return _png(figure)


def _figure():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, 2)


def _series(figures):
    rows = [{"step": one.step} | rates([one]) for one in figures]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _line(axes, series, name, label, color, dash):
    steps, values = series["step"], centred_mean(series["step"], series[name])
    axes.plot(steps, values, dash, color=color, label=label, lw=1.8,
              marker="o" if len(steps) < 3 else None)


def _label_ends(axes):
    """Names lines at their right end, spread so that no two names overlap."""
    lines = [line for line in axes.get_lines() if np.isfinite(line.get_ydata()).any()]
    axes.margins(x=0.02)
    low, high = axes.get_ylim()
    gap = (high - low) / 18
    lines.sort(key=lambda line: _last(line)[1])
    heights = [_last(line)[1] for line in lines]
    for place in range(1, len(lines)):
        heights[place] = max(heights[place], heights[place - 1] + gap)
    for place in reversed(range(len(lines))):
        limit = heights[place + 1] - gap if place + 1 < len(lines) else high
        heights[place] = min(heights[place], limit)
    for line, height in zip(lines, heights):
        axes.annotate(line.get_label(), _last(line), (1.05, height), fontsize=8, va="center",
                      textcoords=axes.get_yaxis_transform(), color=line.get_color(),
                      arrowprops={"arrowstyle": "-", "color": line.get_color(), "lw": 0.6,
                                  "shrinkA": 1, "shrinkB": 2}, annotation_clip=False)


def _last(line):
    finite = np.flatnonzero(np.isfinite(line.get_ydata()))[-1]
    return line.get_xdata()[finite], line.get_ydata()[finite]


def _by_third(axes, parts):
    axes.set_xticks(range(len(parts)), [
        f"{name}\nsteps {chosen[0].step}-{chosen[-1].step}" for name, chosen in parts.items()])
    axes.tick_params(axis="x", length=0)


def _short(value):
    return "-" if not np.isfinite(value) else f"{value:.0f}"


def _finish(axes, title, unit, ticks=True):
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_ylabel(unit)
    if ticks:
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e8ec", lw=0.8)
    axes.set_axisbelow(True)


def _png(figure):
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()
