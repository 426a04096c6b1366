"""Pictures of a study: learning curves, the path through the errors, and what to watch."""

import io
from collections.abc import Sequence

import numpy as np

from memcalib_jax.synthetic.summary import GOAL, Run

_WINDOW = 5
_COLORS = {"grpo": "#8a8f98", "gdpo": "#e08a1e", "memcalib": "#1d3f72", "guarded": "#1b8a5a",
           "absolute": "#8f1d2f", "positive_only": "#7a5195"}
_DASHES = ("-", "--", ":", "-.")


def learning_picture(runs: Sequence[Run]) -> bytes:
    """Draws SCS over the steps, and the way through the (sMOS, sMUS) plane; returns a PNG.

    Lines are means over seeds of five-step means of the rollouts, bands one standard deviation.
    """
    figure, (left, right) = _figure(1, 2, (11.5, 4.8))
    for arm, style in _styles(runs).items():
        steps, values = _curves(runs, arm, "rollout/SCS")
        _band(left, steps, values, style, f"{arm} ({_seeds(len(values))})")
        over, under = (_curves(runs, arm, f"rollout/{name}")[1].mean(axis=0)
                       for name in ("sMOS", "sMUS"))
        right.plot(over, under, label=arm, linewidth=1.8, **style)
        every = (steps % 10 == 0) & (steps > steps[0])
        right.plot(over[every], under[every], ".", color=style["color"], markersize=7)
        right.plot(over[-1], under[-1], "o", color=style["color"], markersize=8)
    left.axhline(GOAL, color="#999999", linewidth=0.8, linestyle=":")
    _finish(left, "SCS of the rollouts (higher is better)", "step", "percent")
    left.legend(fontsize=8.5, frameon=False, loc="lower right")
    _finish(right, "Both errors on the way: a dot each 10 steps, the end a disc",
            "over-use: sMOS, percent", "under-use: sMUS, percent")
    right.grid(axis="x", color="#dddddd", linewidth=0.7)
    right.legend(fontsize=8.5, frameon=False, loc="upper left")
    return _png(figure)


def watch_picture(runs: Sequence[Run]) -> bytes:
    """Draws length, responses without a stop token, KL and the C+ threshold; returns a PNG."""
    panels = (("rollout/length_mean", "Length", "tokens", 1.0),
              ("rollout/stopped", "Responses without a stop token", "percent", None),
              ("loss/kl", "KL to the start", "nats a token", 1.0),
              ("credit/C+/threshold", "Threshold of C+", "nats", 1.0))
    figure, axes = _figure(2, 2, (11.5, 6.4))
    for panel, (name, title, unit, scale) in zip(axes.flat, panels):
        for arm, style in _styles(runs).items():
            steps, values = _curves(runs, arm, name)
            if np.isnan(values).all():
                continue
            _band(panel, steps, 100 * (1 - values) if scale is None else scale * values, style, arm)
        _finish(panel, title, "step", unit)
    axes[0, 0].legend(fontsize=8.5, frameon=False)
    return _png(figure)


def _styles(runs):
    """Returns the line of each arm: a color a method, a dash a KL weight."""
    styles = {}
    for arm in dict.fromkeys(run.arm for run in runs):
        name, weight = arm.split("@")
        weights = sorted({run.arm.split("@")[1] for run in runs if run.arm.startswith(f"{name}@")},
                         key=float, reverse=True)
        styles[arm] = {"color": _COLORS[name],
                       "linestyle": _DASHES[weights.index(weight) % len(_DASHES)]}
    return styles


def _curves(runs, arm, name):
    """Returns steps and, a row a seed, the means of the steps around each, where all seeds are."""
    mine = [run for run in runs if run.arm == arm]
    length = min(len(run.steps) for run in mine)
    values = np.array([[row.get(name, np.nan) for row in run.steps[:length]] for run in mine])
    half = _WINDOW // 2
    smooth = np.stack([values[:, max(0, place - half):place + half + 1].mean(axis=1)
                       for place in range(length)], axis=1)
    return np.array([row["step"] for row in mine[0].steps[:length]]), smooth


def _band(axes, steps, values, style, label):
    mean = values.mean(axis=0)
    axes.plot(steps, mean, label=label, linewidth=1.8, **style)
    if len(values) > 1:
        spread = values.std(axis=0, ddof=1)
        axes.fill_between(steps, mean - spread, mean + spread, color=style["color"], alpha=0.15,
                          linewidth=0)


def _seeds(count):
    return "1 seed" if count == 1 else f"{count} seeds"


def _figure(rows, columns, size):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns)


def _finish(axes, title, across, up):
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _png(figure):
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()
