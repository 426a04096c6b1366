"""The paper's tables from results, by literal values."""

import pytest

from memcalib_jax.credit import CHANNELS
from memcalib_jax.evaluation import tables
from memcalib_jax.evaluation.summary import METRICS


def results(means, std=0.5, *, sha256="a" * 64, judge="j", note=None, valid=6, **settings):
    """Makes results with the six metrics in the order of METRICS."""
    return {
        "note": note, "judge": {"model": judge},
        "records": {"in_file": 2, "too_long": 0, "answered": 2, "sha256": sha256},
        "seeds": [{"seed": seed, "responses": 2} for seed in range(3)],
        "overall": {"valid": valid, "mean": dict(zip(METRICS, means)),
                    "std": dict.fromkeys(METRICS, std)},
        "settings": {"num_seeds": 3, "representation": "fluent", "temperature": 1.0,
                     "top_p": 1.0, "max_response_tokens": 16} | settings}


LOW = [72.254, 57.9, 11.0, 20.0, 15.0, 30.0]
MIDDLE = [77.94, 65.62, 9.5, 12.0, 15.0, 20.0]
HIGH = [79.544, 67.89, 8.25, 12.0, 14.0, 18.0]


def test_a_table_of_metrics_as_markdown():
    table = tables.metric_table(12, {
        "0": results(LOW), "0.75": results(HIGH, 0.123), "1.0": results(MIDDLE, None)})
    assert tables.markdown(table) == """\
**Table 12.** Sensitivity to the localization coefficient (mean ± standard deviation over seeds, \
n - 1).

| η | SCS ↑ | Exact ↑ | sMOS ↓ | sMUS ↓ | AOR ↓ | AUR ↓ |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| 0 | 72.25 ± 0.50 | 57.90 ± 0.50 | 11.00 ± 0.50 | <u>20.00 ± 0.50</u> | <u>15.00 ± 0.50</u> \
| 30.00 ± 0.50 |
| 0.75 | **79.54 ± 0.12** | **67.89 ± 0.12** | **8.25 ± 0.12** | **12.00 ± 0.12** \
| **14.00 ± 0.12** | **18.00 ± 0.12** |
| 1.0 | <u>77.94</u> | <u>65.62</u> | <u>9.50</u> | **12.00** | <u>15.00</u> | <u>20.00</u> |

Bold: best; underlined: second best.
"""


def test_a_table_of_metrics_as_latex():
    table = tables.metric_table(1, {"a_b & c": results(LOW), "d": results(HIGH)})
    assert tables.latex(table) == r"""\begin{table}[t]
\centering
\caption{Memory use of models (mean $\pm$ standard deviation over seeds, n - 1). Red: best; blue: second best.}
\begin{tabular}{lrrrrrr}
\toprule
Model & SCS $\uparrow$ & Exact $\uparrow$ & sMOS $\downarrow$ & sMUS $\downarrow$ & AOR $\downarrow$ & AUR $\downarrow$ \\
\midrule
a\_b \& c & \textcolor{blue}{72.25 $\pm$ 0.50} & \textcolor{blue}{57.90 $\pm$ 0.50} & \textcolor{blue}{11.00 $\pm$ 0.50} & \textcolor{blue}{20.00 $\pm$ 0.50} & \textcolor{blue}{15.00 $\pm$ 0.50} & \textcolor{blue}{30.00 $\pm$ 0.50} \\
d & \textcolor{red}{79.54 $\pm$ 0.50} & \textcolor{red}{67.89 $\pm$ 0.50} & \textcolor{red}{8.25 $\pm$ 0.50} & \textcolor{red}{12.00 $\pm$ 0.50} & \textcolor{red}{14.00 $\pm$ 0.50} & \textcolor{red}{18.00 $\pm$ 0.50} \\
\bottomrule
\end{tabular}
\end{table}
"""


def test_marks_are_by_unrounded_means_and_a_single_run_has_none():
    close = tables.metric_table(3, {"a": results([50.001] * 6), "b": results([50.002] * 6)})
    assert [cell.mark for cell in close.rows[0][1:]] == ["second"] * 2 + ["best"] * 4
    alone = tables.metric_table(3, {"a": results(LOW)})
    assert [cell.mark for cell in alone.rows[0][1:]] == [""] * 6
    assert "Bold" not in tables.markdown(alone) and "Red" not in tables.latex(alone)


GROUPS = {"Qwen": {"GDPO": results(LOW), "Ours": results(HIGH)},
          "Ministral": {"Base": results(MIDDLE), "Ours": results(LOW)}}


def test_the_main_table_marks_within_a_model():
    table = tables.main_table(GROUPS)
    lines = tables.markdown(table).splitlines()
    assert lines[2:7] == [
        "| Method | Qwen SCS ↑ | Qwen Exact ↑ | Ministral SCS ↑ | Ministral Exact ↑ |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| GDPO | <u>72.25 ± 0.50</u> | <u>57.90 ± 0.50</u> | - | - |",
        "| Ours | **79.54 ± 0.50** | **67.89 ± 0.50** | <u>72.25 ± 0.50</u> "
        "| <u>57.90 ± 0.50</u> |",
        "| Base | - | - | **77.94 ± 0.50** | **65.62 ± 0.50** |"]
    assert (r" & \multicolumn{2}{c}{Qwen} & \multicolumn{2}{c}{Ministral} \\" "\n"
            r"Method & SCS $\uparrow$ & Exact $\uparrow$ & SCS $\uparrow$ & Exact $\uparrow$ \\"
            ) in tables.latex(table)


def test_the_complete_table_has_all_metrics_of_each_model():
    table = tables.complete_table(GROUPS)
    assert [row[:2] for row in table.rows] == [
        ["Qwen", "GDPO"], ["Qwen", "Ours"], ["Ministral", "Base"], ["Ministral", "Ours"]]
    assert [cell.text for cell in table.rows[2][2:]] == [
        "77.94 ± 0.50", "65.62 ± 0.50", "9.50 ± 0.50", "12.00 ± 0.50", "15.00 ± 0.50",
        "20.00 ± 0.50"]
    # Where all are equal nothing is marked.
    assert [cell.mark for cell in table.rows[2][2:]] == ["best"] * 4 + ["", "best"]
    assert [cell.mark for cell in table.rows[3][2:]] == ["second"] * 4 + [""] + ["second"]


def test_the_channels_of_two_runs():
    shares = [[96.66, 2.214, 1.13, 34.89, 62.92, 2.19, None, None, None],
              [97.69, 1.776, 1.13, 5.71, 92.01, 2.28, None, None, None]]
    before, after = (
        results(LOW) | {"macro_accuracy": macro, "channels": {
            name: {"of_ideal": share} for name, share in zip(CHANNELS, row)}}
        for macro, row in zip((77.94, 94.75), shares))
    table = tables.channel_table({"Cold-start": before, "Ours": after})
    assert tables.markdown(table).splitlines()[2:] == [
        "| Channel | Cold-start (%) | Ours (%) | Change |",
        "| --- | ---: | ---: | ---: |",
        "| A+ | 96.66 | 97.69 | **+1.03** |",
        "| AB- | 2.21 | 1.78 | **-0.44** |",
        "| AC- | 1.13 | 1.13 | +0.00 |",
        "| BA- | 34.89 | 5.71 | **-29.18** |",
        "| B+ | 62.92 | 92.01 | **+29.09** |",
        "| BC- | 2.19 | 2.28 | <u>+0.09</u> |",
        "| CA- | - | - | - |", "| CB- | - | - | - |", "| C+ | - | - | - |",
        "| Macro-averaged accuracy | 77.94 | 94.75 | **+16.81** |",
        "", "Bold: for the better; underlined: for the worse."]
    assert r"$BC^{-}$ & 2.19 & 2.28 & \textcolor{blue}{+0.09} \\" in tables.latex(table)
    with pytest.raises(ValueError, match="compares two runs, not 1"):
        tables.channel_table({"Ours": after})


def test_the_agreement_of_judges():
    comparison = {
        "judges": ["first", "second"], "note": None,
        "metrics": {name: {"spearman": 0.9762 if name == "SCS" else 1.0,
                           "pearson": None if name == "AUR" else 0.998} for name in METRICS},
        "atoms": {"gdpo": {"atoms": 1000, "same": 956, "agreement": 95.6,
                           "responses_left_out": 0},
                  "ours": {"atoms": 1000, "same": 979, "agreement": 97.9,
                           "responses_left_out": 2}}}
    lines = tables.markdown(tables.agreement_table(comparison)).splitlines()
    assert lines[2:5] == ["| Metric | Spearman | Pearson |", "| --- | ---: | ---: |",
                          "| SCS | 0.976 | 0.998 |"]
    assert lines[9] == "| AUR | 1.000 | - |"
    assert lines[10:] == [
        "", "first and second, over 2 methods.",
        "", "gdpo: 95.60% of 1000 atoms at the same level.",
        "", "ours: 97.90% of 1000 atoms at the same level, 2 responses left out."]
    with pytest.raises(ValueError, match="rejudge more than one"):
        tables.agreement_table(comparison | {"metrics": None})


def test_what_a_reader_must_know_stands_under_the_table():
    table = tables.metric_table(1, {
        "a": results(LOW, note="NO REAL JUDGMENTS", valid=5), "b": results(HIGH, num_seeds=2)})
    assert table.notes == (
        "NO REAL JUDGMENTS", "Not like for like: num_seeds is 3 (a); 2 (b)",
        "a: 1 of 6 responses have no valid judgment and are left out")
    assert all(note in tables.markdown(table) for note in table.notes)


@pytest.mark.parametrize("changes, said", [
    ({"sha256": "b" * 64}, r"a and b answer different records \(2 and 2\)"),
    ({"sha256": None}, "b: results without a hash of their records"),
    ({"judge": "k"}, r"a and b were judged by different models \(j and k\)"),
])
def test_what_is_no_one_table_is_refused_by_name(changes, said):
    runs = {"a": results(LOW), "b": results(HIGH, **changes)}
    with pytest.raises(ValueError, match=said):
        tables.metric_table(1, runs)
    with pytest.raises(ValueError, match=said.replace("a and b", "M/a and N/b")
                       .replace("b: results", "N/b: results")):
        tables.main_table({"M": {"a": runs["a"]}, "N": {"b": runs["b"]}})
