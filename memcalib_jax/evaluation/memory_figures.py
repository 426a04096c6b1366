"""Pictures of memory evaluations and trainings: figures 2, 4, 11 and 12 of Memory-R2."""

import io
from collections.abc import Mapping, Sequence

import numpy as np

_COLORS = ("#2e6fbb", "#d1495b", "#1b8a5a", "#e9a23b", "#7a5195", "#5b6472", "#2a9d8f", "#8f1d2f")


def scores_picture(runs: Mapping[str, Mapping]) -> bytes:
    """Draws F1 over all questions and by category, a bar an evaluation (figure 2); a PNG."""
    names = list(dict.fromkeys(group for results in runs.values()
                               for group in results["summary"]["category"]))
    figure, (axes,) = _figure(1)
    for place, (name, results) in enumerate(runs.items()):
        groups = [results["summary"]["all"],
                  *(results["summary"]["category"].get(group) for group in names)]
        means, spreads = zip(*(_mean_std((group or {}).get("f1")) for group in groups))
        width = 0.8 / len(runs)
        at = np.arange(len(groups)) - 0.4 + width * (place + 0.5)
        bars = axes.bar(at, np.nan_to_num(means), 0.92 * width, yerr=np.nan_to_num(spreads),
                        color=_color(place), label=name, error_kw={"lw": 1})
        axes.bar_label(bars, [_short(mean) for mean in means], fontsize=8, padding=2)
    axes.set_xticks(range(len(names) + 1), ["all", *names])
    axes.legend(frameon=False, fontsize=9)
    _finish(axes, "F1 by category", "%")
    return _png(figure)


def sweep_picture(runs: Mapping[float, Mapping]) -> bytes:
    """Draws F1 and BLEU-1 against a setting, such as lambda (figure 4); a PNG."""
    figure, (axes,) = _figure(1)
    values = sorted(runs)
    for place, (metric, label) in enumerate((("f1", "F1"), ("bleu_1", "BLEU-1"))):
        means, spreads = zip(*(_mean_std(runs[value]["summary"]["all"][metric])
                               for value in values))
        axes.errorbar(values, means, np.nan_to_num(spreads), color=_color(place), label=label,
                      marker="o", capsize=3)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.legend(frameon=False, fontsize=9)
    _finish(axes, "scores by the setting's value", "%")
    return _png(figure)


def training_picture(trainings: Mapping[str, Sequence[Sequence[Mapping]]],
                     runs: Mapping[str, Mapping]) -> bytes:
    """Draws figure 11: validation F1 and M-Fail, bank size, and F1 by session; a PNG.

    Args:
      trainings: by name, for each stage the rows of its metrics.
      runs: evaluations by name, for the last panel.
    """
    figure, panels = _figure(4)
    wanted = (("eval/f1", "validation F1"), ("eval/failure", "validation M-Fail"),
              ("memory/entries", "entries of terminal banks"))
    for axes, (key, title) in zip(panels, wanted):
        for place, (name, stages) in enumerate(trainings.items()):
            steps, values, ends = _series(stages, key)
            axes.plot(steps, values, color=_color(place), marker=".", label=name)
            for end in ends[:-1]:
                axes.axvline(end + 0.5, color=_color(place), lw=0.7, ls=":")
        axes.set_xlabel("step; dotted: stages")
        _finish(axes, title, "")
    for place, (name, results) in enumerate(runs.items()):
        sessions = sorted(results["summary"]["session"], key=int)
        means = [_mean_std(results["summary"]["session"][s]["f1"])[0] for s in sessions]
        panels[3].plot(list(map(int, sessions)), means, color=_color(place), marker=".",
                       label=name)
    panels[3].set_xlabel("session of the latest evidence")
    _finish(panels[3], "F1 by session", "%")
    for axes in panels:
        if axes.has_data():
            axes.legend(frameon=False, fontsize=8)
    return _png(figure)


def cost_picture(runs: Mapping[str, Mapping]) -> bytes:
    """Draws figure 12: seconds and tokens of a conversation, and how long replies are; a PNG."""
    figure, (time, tokens, tails) = _figure(3)
    names = list(runs)
    for axes, title, values in (
            (time, "seconds a conversation", [run["seconds"] for run in runs.values()]),
            (tokens, "sampled tokens a conversation",
             [(run["tokens"] or {}).get("per_conversation") for run in runs.values()])):
        means, spreads = zip(*map(_mean_std, values))
        bars = axes.bar(range(len(names)), np.nan_to_num(means), yerr=np.nan_to_num(spreads),
                        color=[_color(place) for place in range(len(names))])
        axes.bar_label(bars, [_short(mean) for mean in means], fontsize=8, padding=2)
        axes.set_xticks(range(len(names)), names)
        _finish(axes, title, "")
    marks = ("p50", "p90", "p99", "longest")
    for place, (name, run) in enumerate(runs.items()):
        if run["tokens"]:
            tails.plot(marks, [run["tokens"][mark]["mean"] for mark in marks], marker="o",
                       color=_color(place), label=name)
    if tails.has_data():
        tails.legend(frameon=False, fontsize=9)
    _finish(tails, "tokens of a reply", "")
    return _png(figure)


def _series(stages, key):
    """Returns the steps, counted over stages, the values there, and each stage's last step."""
    steps, values, ends, before = [], [], [], 0
    for rows in stages:
        for row in rows:
            if isinstance(row.get(key), int | float):
                steps.append(before + row["step"])
                values.append(row[key])
        before += max((row["step"] for row in rows), default=0)
        ends.append(before)
    return steps, values, ends


def _mean_std(value) -> tuple[float, float]:
    if value is None:
        return float("nan"), float("nan")
    return value["mean"], float("nan") if value["std"] is None else value["std"]


def _short(value):
    return "-" if np.isnan(value) else f"{value:.3g}"


def _color(place):
    return _COLORS[place % len(_COLORS)]


def _figure(panels):
    # Imported here since it takes a second. Not pyplot, which would keep every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.4, 4.2 * panels), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _finish(axes, title, unit):
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)


def _png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
