"""Evaluations of runs that differ in one setting, as text and as a picture (figure 3 (a))."""

import io
import math
from collections.abc import Mapping

from memcalib_jax.evaluation.summary import HIGHER_IS_BETTER, METRICS

_COLORS = {"SCS": "#1f2a44", "Exact": "#4c8dae", "sMOS": "#8f1d2f", "AOR": "#e08a8f",
           "sMUS": "#1d3f72", "AUR": "#7fb2e5"}


def table(name: str, runs: Mapping[str, dict]) -> str:
    """Lays the runs' metrics out as plain text.

    Args:
      name: the setting.
      runs: evaluations' results by its value.
    """
    width = max(len(name), *map(len, runs)) + 2
    lines = [f"{name:<{width}}" + "".join(f"{metric:>15}" for metric in METRICS)]
    for label, results in runs.items():
        lines.append(f"{label:<{width}}" + "".join(
            f"{_figure(results['overall'], metric):>15}" for metric in METRICS))
    notes = dict.fromkeys(results["note"] for results in runs.values() if results["note"])
    return "\n".join([*lines, "Percent; mean and standard deviation (n - 1) over seeds.", *notes])


def picture(name: str, runs: Mapping[str, dict]) -> bytes:
    """Draws SCS and Exact, and the four errors, over the setting; returns a PNG.

    Values that are all numbers have their place on the axis; others stand side by side.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    numbers = [_number(label) for label in runs]
    numeric = None not in numbers and len(set(numbers)) == len(numbers)
    places = numbers if numeric else list(range(len(runs)))
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    errors = [metric for metric in METRICS if metric not in HIGHER_IS_BETTER]
    for axes, metrics, title in zip(figure.subplots(1, 2), (HIGHER_IS_BETTER, errors),
                                    ("Higher is better", "Lower is better")):
        for metric in metrics:
            points = sorted(zip(places, (results["overall"] for results in runs.values())),
                            key=lambda point: point[0])
            axes.errorbar([place for place, _ in points],
                          [_or_nan(overall["mean"][metric]) for _, overall in points],
                          [overall["std"][metric] or math.nan for _, overall in points],
                          color=_COLORS[metric], marker="o", markersize=5, capsize=3,
                          linewidth=1.8 if numeric else 0, elinewidth=1, label=metric)
        axes.set_xticks(places, list(runs))
        axes.set_xlabel(name)
        axes.set_ylabel("percent")
        axes.margins(y=0.12)
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8.5, frameon=False, ncols=4, loc="lower right",
                    bbox_to_anchor=(1.0, 0.98), borderaxespad=0.2)
        if not numeric and max(map(len, runs)) > 12:
            axes.tick_params(axis="x", labelrotation=20, labelsize=8)
    figure.suptitle("Mean over seeds; whiskers: standard deviation", fontsize=10, x=0.01,
                    ha="left")
    notes = dict.fromkeys(results["note"] for results in runs.values() if results["note"])
    if notes:
        figure.supxlabel("\n".join(notes), color="#b00020", fontsize=9, weight="bold")
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _number(label):
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _or_nan(value):
    return math.nan if value is None else value


def _figure(overall, metric):
    mean, std = overall["mean"][metric], overall["std"][metric]
    return "-" if mean is None else f"{mean:.2f}" + ("" if std is None else f" ±{std:.2f}")
