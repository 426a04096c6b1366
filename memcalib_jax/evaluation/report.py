"""An evaluation's results as text and as a picture."""

import io
import json
import math
import pathlib

from memcalib_jax.credit import CHANNELS
from memcalib_jax.evaluation.summary import HIGHER_IS_BETTER, METRICS
from memcalib_jax.judge.server import MODEL_NAME

FORMAT = "memcalib_jax.evaluation/1"

STAND_IN_NOTE = ("NO REAL JUDGMENTS: the judge is the lexical stand-in, which compares words; no "
                 "measure of a model")
_LEVELS = ("Ignore", "Bound", "Control")
_LABEL, _CELL = 14, 14  # columns


def judge_note(judge_model: str) -> str | None:
    """Returns what a reader must know of the judge before the figures, if anything."""
    return STAND_IN_NOTE if judge_model == MODEL_NAME else None


def load_results(path) -> dict:
    """Reads a `results.json`.

    Raises:
      ValueError: there is no such file, or it holds no evaluation's results; says what to do.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give the results.json of an "
                         "evaluation that has ended") from None
    except ValueError:
        results = None
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise ValueError(f"{path}: no results of an evaluation (format {FORMAT}); give a "
                         "results.json written by experiments.evaluate")
    return results


def table(results: dict) -> str:
    """Lays an evaluation out as plain text of at most 100 columns."""
    records, seeds = results["records"], results["seeds"]
    invalid: dict[str, int] = {}
    for seed in seeds:
        for reason, count in seed["invalid"].items():
            invalid[reason] = invalid.get(reason, 0) + count
    lines = [f"Memory use of {_model_and_judge(results)}"]
    lines += [results["note"], ""] if results["note"] else [""]
    lines.append(
        f"{_count(records['answered'], 'record')} ({records['too_long']} skipped as too long), "
        f"{_count(len(seeds), 'seed')}: {sum(seed['responses'] for seed in seeds)} responses, "
        f"{results['overall']['valid']} judged, {sum(invalid.values())} invalid")
    lines += [f"  {count} invalid: {reason}" for reason, count in sorted(invalid.items())]
    lines += ["", " " * _LABEL + "".join(f"{name:>{_CELL}}" for name in METRICS),
              " " * _LABEL + "".join(f"{_direction(name):>{_CELL}}" for name in METRICS)]
    for label, figures in _groups(results).items():
        lines.append(f"{_shortened(label):<{_LABEL}}" + "".join(
            f"{_mean_std(figures, name):>{_CELL}}" for name in METRICS))
    lines += ["Percent; mean and standard deviation (n - 1) over seeds.", ""]

    lines.append("Atoms by ideal level, in percent of the level's atoms (all seeds pooled)")
    lines.append(f"{'':{_LABEL}}" + "".join(
        f"{'judged ' + level:>{_CELL + 2}}" for level in _LEVELS) + f"{'atoms':>{_CELL - 2}}")
    for row, level in enumerate(_LEVELS):
        cells = [results["channels"][name] for name in CHANNELS[3 * row:3 * row + 3]]
        lines.append(f"{'ideal ' + level:<{_LABEL}}" + "".join(
            f"{_percent(cell['of_ideal']):>{_CELL + 2}}" for cell in cells)
            + f"{sum(cell['atoms'] for cell in cells):>{_CELL - 2}}")
    lines.append(f"Macro accuracy (mean of the diagonal): {_percent(results['macro_accuracy'])}")
    return "\n".join(lines)


def compare(results_before: dict, results_after: dict) -> str:
    """Lays two evaluations side by side, with the change and whether it is for the better."""
    before, after = results_before, results_after
    lines = [f"before: {_model_and_judge(before)}", f"after:  {_model_and_judge(after)}",
             *dict.fromkeys(results["note"] for results in (before, after) if results["note"])]
    lines += [f"Not like for like: {difference}" for difference in _differences(before, after)]
    lines += ["", f"{'':{_LABEL}}{'':>8}{'before':>{_CELL}}{'after':>{_CELL}}{'change':>10}"]
    for name in METRICS:
        first, second = (results["overall"]["mean"][name] for results in (before, after))
        spreads = [results["overall"]["std"][name] for results in (before, after)]
        spread = None if None in spreads else math.hypot(*spreads)
        lines.append(
            f"{name:<{_LABEL}}{_direction(name):>8}"
            f"{_mean_std(before['overall'], name):>{_CELL}}"
            f"{_mean_std(after['overall'], name):>{_CELL}}"
            + _change(first, second, name in HIGHER_IS_BETTER, spread))
    lines += ["", "Atoms in percent of those of their ideal level (all seeds pooled)"]
    for index, name in enumerate(CHANNELS):
        first, second = (results["channels"][name]["of_ideal"] for results in (before, after))
        label = f"{name:<5}{_LEVELS[index // 3]} used as {_LEVELS[index % 3]}"
        lines.append(_pooled_line(label, first, second, name.endswith("+")))
    lines.append(_pooled_line("Macro accuracy", before["macro_accuracy"],
                              after["macro_accuracy"], True))
    return "\n".join(lines)


def picture(results: dict) -> bytes:
    """Draws the metrics as bars and the use levels as a matrix; returns a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    bars, matrix = figure.subplots(1, 2, width_ratios=(1.75, 1))
    _draw_bars(bars, _groups(results))
    _draw_matrix(matrix, results)
    figure.suptitle(f"Memory use of {_model_and_judge(results)}", fontsize=12, x=0.01, ha="left")
    if results["note"]:
        figure.supxlabel(results["note"], color="#b00020", fontsize=10, weight="bold")
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _model_and_judge(results):
    name, checkpoint = pathlib.PurePath(results["model"]).name, results["checkpoint"]
    if checkpoint is not None:
        run = pathlib.PurePath(checkpoint["run"])
        # A run keeps its best checkpoint in a folder of that name.
        shown = f"{run.parent.name}/best" if run.name == "best" else run.name
        name += f", step {checkpoint['step']} of {shown}"
    return f"{name}, judged by {results['judge']['model']}"


def _groups(results):
    groups = {"all": results["overall"]}
    return groups | (results["by_domain"] if len(results["by_domain"]) > 1 else {})


def _differences(before, after):
    """Says in which respects, besides the model, two evaluations differ."""
    found = []
    if before["judge"]["model"] != after["judge"]["model"]:
        found.append("the judges differ")
    for name, words in (("prompts_sha256", "the prompts"), ("num_seeds", "the number of seeds"),
                        ("seed", "the first seed"), ("temperature", "the temperature"),
                        ("top_p", "top-p"), ("max_response_tokens", "the response limit")):
        values = [results["settings"].get(name) for results in (before, after)]
        if values[0] != values[1]:
            shown = "" if name == "prompts_sha256" else f" ({values[0]} before, {values[1]} after)"
            found.append(f"{words} differ{'' if words.endswith('s') else 's'}{shown}")
    return found


def _pooled_line(label, first, second, higher_is_better):
    return (f"{label:<{_LABEL + 15}}{_percent(first):>7}{_percent(second):>{_CELL}}"
            + _change(first, second, higher_is_better))


def _change(first, second, higher_is_better, spread=None):
    if first is None or second is None:
        return f"{'-':>10}"
    change = second - first
    if spread is not None and change and abs(change) <= spread:
        verdict = "within the spread over seeds"
    elif change:
        verdict = "better" if (change > 0) == higher_is_better else "worse"
    else:
        verdict = "same"
    return f"{change:>+10.2f}  {verdict}"


def _mean_std(figures, name):
    mean, std = figures["mean"][name], figures["std"][name]
    return _percent(mean) + ("" if std is None else f" ±{std:.2f}")


def _percent(value):
    return "-" if value is None else f"{value:.2f}"


def _direction(name):
    return "higher" if name in HIGHER_IS_BETTER else "lower"


def _count(number, noun):
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _shortened(label):
    return label if len(label) < _LABEL else label[:_LABEL - 3] + ".."


def _draw_bars(axes, groups):
    colors = ("#1f2a44", "#4c8dae", "#8fbf9f", "#d9a05b", "#b07aa1", "#9c9c9c")
    width = 0.8 / len(groups)
    for place, (label, figures) in enumerate(groups.items()):
        offset = (place - (len(groups) - 1) / 2) * width
        means = [figures["mean"][name] for name in METRICS]
        heights = [math.nan if mean is None else mean for mean in means]
        # A whisker of length 0 would look like a dash on the bar.
        spreads = [figures["std"][name] or math.nan for name in METRICS]
        centers = [x + offset for x in range(len(METRICS))]
        axes.bar(centers, heights, 0.92 * width, color=colors[place % len(colors)],
                 label=f"{label} ({_count(figures['records'], 'record')})")
        axes.errorbar(centers, heights, spreads, fmt="none", elinewidth=1, capsize=2,
                      ecolor="#555555")
        if place == 0:
            for x, height, spread in zip(centers, heights, spreads):
                top = height + (0.0 if math.isnan(spread) else spread)
                axes.text(x, top + 1, f"{height:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(METRICS)),
                    [f"{name}\n{_direction(name)} is better" for name in METRICS], fontsize=8.5)
    axes.set_ylim(0, 108)
    axes.set_ylabel("percent")
    axes.set_title("Mean over seeds; whiskers: standard deviation", fontsize=10, loc="left")
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8.5, frameon=False, ncols=min(len(groups), 4), loc="upper center",
                bbox_to_anchor=(0.5, -0.13))


def _draw_matrix(axes, results):
    channels = [results["channels"][name] for name in CHANNELS]
    shares = [[cell["of_ideal"] or 0.0 for cell in channels[3 * row:3 * row + 3]]
              for row in range(3)]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for index, (name, cell) in enumerate(zip(CHANNELS, channels)):
        row, column = divmod(index, 3)
        color = "white" if shares[row][column] > 55 else "#1f2a44"
        share = "-" if cell["of_ideal"] is None else f"{cell['of_ideal']:.1f}%"
        axes.text(column, row - 0.08, share, ha="center", va="center", color=color,
                  fontsize=13, weight="bold" if row == column else "normal")
        axes.text(column, row + 0.2, f"{name}   {_count(cell['atoms'], 'atom')}", ha="center",
                  va="center", color=color, fontsize=8.5)
    axes.set_xticks(range(3), _LEVELS)
    axes.set_yticks(range(3), _LEVELS)
    axes.set_xlabel("judged use")
    axes.set_ylabel("ideal use")
    axes.set_title(f"Atoms, percent of the row; macro accuracy "
                   f"{results['macro_accuracy']:.1f}%", fontsize=10, loc="left")
    for edge in (0.5, 1.5):
        axes.axhline(edge, color="white", linewidth=3)
        axes.axvline(edge, color="white", linewidth=3)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
