"""`python -m experiments.tables` on evaluations and a rejudging, made over HTTP on this machine."""

import json

import pytest

from memcalib_jax.data import load_records, sample_path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, records_file, judge_url, run_program):
    """Evaluations of answers that quote all memories, none, or those of two blocks; one of other
    records; the first three judged again."""
    folder = tmp_path_factory.mktemp("tables")
    records = load_records(records_file)
    others = folder / "other_records.jsonl"
    others.write_text("".join(
        sample_path("records.jsonl").read_text().splitlines(keepends=True)[8:12]))

    def evaluation(name, words, file=records_file):
        responses = folder / f"{name}.jsonl"
        responses.write_text("".join(
            json.dumps({"id": record.id, "seed": seed, "response": f"Well, {words(record)} ."})
            + "\n" for record in load_records(file) for seed in range(2)))
        return [f"--run_dir={folder / name}", f"--responses_file={responses}",
                f"--eval_file={file}", f"--judge_url={judge_url}", "--num_seeds=2",
                "--judge_model=lexical-stand-in"]

    answers = run_program(
        "experiments.evaluate",
        evaluation("all", lambda record: " ".join(block.fluent_text for block in record.blocks)),
        evaluation("none", lambda record: "hello"),
        evaluation("two", lambda record: " ".join(b.fluent_text for b in record.blocks[:2])),
        evaluation("others", lambda record: "hello", others))
    answers += run_program("experiments.rejudge", [
        f"--evaluations={','.join(str(folder / name) for name in ('all', 'none', 'two'))}",
        f"--run_dir={folder / 'rejudged'}", f"--judge_url={judge_url}",
        "--judge_model=lexical-stand-in"])
    assert {answer["status"] for answer in answers} == {0}, answers
    assert len(records) == 4
    return folder


@pytest.fixture(scope="module")
def answers(folder, run_program):
    def runs(**labels):
        return "--runs=" + ",".join(f"{label}={folder / name}" for label, name in labels.items())

    three = runs(A="all", N="none", T="two")
    models = runs(**{"M/A": "all", "M/N": "none", "W/T": "two"})
    cases = {
        **{number: [f"--table={number}", three, f"--output_dir={folder / 'out'}"]
           for number in ("1", "3", "12")},
        **{number: [f"--table={number}", models, f"--output_dir={folder / 'out'}"]
           for number in ("2", "9")},
        "10": ["--table=10", runs(N="none", A="all"), f"--output_dir={folder / 'out'}"],
        **{number: [f"--table={number}", f"--rejudged={folder / 'rejudged'}",
                    f"--output_dir={folder / 'out'}"] for number in ("13", "14")},
        "equals": ["--table=12", runs(**{"eta=0.5": "all"})],
        "mixed": ["--table=1", runs(A="all", B="others")],
        "repeated": ["--table=1", runs(A="all") + f",A={folder / 'none'}"],
        "no label": ["--table=1", f"--runs={folder / 'all'}"],
        "no model": ["--table=2", three],
        "no runs": ["--table=1"],
        "not rejudged": ["--table=13", three],
        "no rejudging": ["--table=14", f"--rejudged={folder / 'all'}"],
        "absent": ["--table=1", runs(A="absent")],
        "unknown": ["--table=4", three],
    }
    return dict(zip(cases, run_program("experiments.tables", *cases.values()), strict=True))


def rows(folder, number):
    """The rows of a Markdown table, without marks."""
    lines = (folder / "out" / f"table_{number}.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in lines if line.startswith("|")]
    for mark in ("**", "<u>", "</u>"):
        cells = [[cell.replace(mark, "") for cell in row] for row in cells]
    return cells[:1] + cells[2:]


def figure(results, metric):
    overall = results["overall"]
    return f"{overall['mean'][metric]:.2f} ± {overall['std'][metric]:.2f}"


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("number", ["1", "3", "12"])
def test_a_row_a_run(answers, folder, number):
    assert answers[number]["status"] == 0, answers[number]["err"]
    metrics = [name.split()[0] for name in rows(folder, number)[0][1:]]
    assert sorted(metrics) == ["AOR", "AUR", "Exact", "SCS", "sMOS", "sMUS"]
    expected = [[label, *(figure(results_of(folder / name), metric) for metric in metrics)]
                for label, name in (("A", "all"), ("N", "none"), ("T", "two"))]
    assert rows(folder, number)[1:] == expected
    assert len({row[1] for row in expected}) > 1


def test_a_model_s_methods(answers, folder):
    assert answers["2"]["status"] == answers["9"]["status"] == 0
    results = {name: results_of(folder / name) for name in ("all", "none", "two")}
    assert rows(folder, 2) == [
        ["Method", "M SCS ↑", "M Exact ↑", "W SCS ↑", "W Exact ↑"],
        *([method, figure(results[name], "SCS"), figure(results[name], "Exact"), "-", "-"]
          for method, name in (("A", "all"), ("N", "none"))),
        ["T", "-", "-", figure(results["two"], "SCS"), figure(results["two"], "Exact")]]
    assert [row[:3] for row in rows(folder, 9)[1:]] == [
        ["M", "A", figure(results["all"], "SCS")], ["M", "N", figure(results["none"], "SCS")],
        ["W", "T", figure(results["two"], "SCS")]]


def test_the_channels(answers, folder):
    assert answers["10"]["status"] == 0, answers["10"]["err"]
    before, after = (results_of(folder / name)["channels"] for name in ("none", "all"))
    table = {row[0]: row[1:] for row in rows(folder, 10)[1:]}
    assert len(table) == 10
    first, second = before["AC-"]["of_ideal"], after["AC-"]["of_ideal"]
    assert table["AC-"] == [f"{first:.2f}", f"{second:.2f}", f"{second - first:+.2f}"]
    assert second > first


def test_another_judge(answers, folder):
    assert answers["13"]["status"] == answers["14"]["status"] == 0
    assert rows(folder, 13)[1:] == [
        [name, *row[1:]] for name, row in zip(("all", "none", "two"), rows(folder, 1)[1:])]
    # The same judge again agrees with itself.
    assert rows(folder, 14)[1] == ["SCS", "1.000", "1.000"]
    assert "all: 100.00% of" in (folder / "out" / "table_14.md").read_text()


def test_both_layouts_are_printed_and_written_with_the_note(answers, folder):
    for number in (1, 2, 3, 9, 10, 12, 13, 14):
        for ending in ("md", "tex"):
            text = (folder / "out" / f"table_{number}.{ending}").read_text()
            assert text in answers[str(number)]["out"]
            assert "NO REAL JUDGMENTS" in text


@pytest.mark.parametrize("case, message", [
    ("mixed", "A and B answer different records (4 and 4)"),
    ("repeated", "two runs are called 'A'"),
    ("no label", "is no LABEL=FOLDER"),
    ("no model", "table 2 needs labels MODEL/METHOD, not 'A'"),
    ("no runs", "table 1 is made from --runs, and not --rejudged"),
    ("not rejudged", "table 13 is made from --rejudged, and not --runs"),
    ("no rejudging", "rejudge.json: cannot be read"),
    ("absent", "cannot be read (No such file or directory)"),
    ("unknown", "value should be one of"),
])
def test_mistakes_are_refused(answers, case, message):
    assert answers[case]["status"] == 2
    assert answers[case]["err"].startswith("error: ") and message in answers[case]["err"]


def test_a_label_may_hold_an_equals_sign(answers):
    assert answers["equals"]["status"] == 0 and "| eta=0.5 |" in answers["equals"]["out"]
