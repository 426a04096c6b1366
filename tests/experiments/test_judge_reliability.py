"""`audit_judge` and `rejudge` on evaluations of a tiny model, over HTTP on this machine."""

import csv
import http.server
import io
import json
import shutil
import threading

import pytest

from memcalib_jax.data import load_records
from memcalib_jax.evaluation.agreement import pearson, spearman
from memcalib_jax.evaluation.audit import HUMAN_COLUMN
from memcalib_jax.evaluation.report import load_results

OTHER = "one-level-up"


@pytest.fixture(scope="module")
def other_judge_url():
    """A judge that finds every atom one level above the ideal one, Control at most."""
    class OneLevelUp(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer({"data": [{"id": OTHER}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            payload = json.loads(body["messages"][-1]["content"])
            judgments = [{"atom_id": atom["atom_id"], "u_star": atom["u_star"],
                          "predicted_usage_level": {"A": "B", "B": "C", "C": "C"}[atom["u_star"]],
                          "evidence_quote": "", "reason": "."} for atom in payload["atoms"]]
            self._answer({"choices": [{"index": 0, "finish_reason": "stop", "message": {
                "role": "assistant", "content": json.dumps({"atom_judgments": judgments})}}]})

        def _answer(self, value):
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneLevelUp) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model_dir, records_file, judge_url, run_program):
    """Two finished evaluations, one of longer responses, and one that was cut."""
    folder = tmp_path_factory.mktemp("reliability")
    common = [f"--model_path={tiny_model_dir}", f"--eval_file={records_file}",
              f"--judge_url={judge_url}", "--judge_model=lexical-stand-in", "--num_seeds=2",
              "--dtype=float32"]
    answers = run_program(
        "experiments.evaluate",
        [*common, "--max_response_tokens=16", f"--run_dir={folder / 'short'}"],
        [*common, "--max_response_tokens=40", f"--run_dir={folder / 'long'}"])
    assert [answer["status"] for answer in answers] == [0, 0], answers
    shutil.copytree(folder / "short", folder / "cut")
    journal = folder / "cut" / "seed_1" / "judgments.jsonl"
    journal.write_bytes(journal.read_bytes()[:-40])
    shutil.copytree(folder / "short", folder / "unfinished")
    (folder / "unfinished" / "results.json").unlink()
    return folder


def judged_levels(folder, seed):
    """The letters of each record's atoms, straight from the journal."""
    rows = [json.loads(line) for line in
            (folder / f"seed_{seed}" / "judgments.jsonl").read_text().splitlines()]
    return {row["id"]: {atom["atom_id"]: atom["level"] for atom in row["atoms"]} for row in rows}


def read_csv(path):
    return list(csv.DictReader(io.StringIO(path.read_text("utf-8-sig"))))


def write_csv(path, lines):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, lines[0].keys())
        writer.writeheader()
        writer.writerows(lines)


@pytest.fixture(scope="module")
def audit(folder, run_program, records_file):
    def draw(audit_dir, **changes):
        values = {"audit_dir": folder / audit_dir, "evaluation": folder / "short",
                  "num_random": 10, "num_stratified": 9} | changes
        return [f"--{name}={value}" for name, value in values.items() if value is not None]

    # Records of the same ids with other atoms, and without one that was answered.
    lines = records_file.read_text().splitlines(keepends=True)
    (folder / "fewer.jsonl").write_text("".join(lines[:-1]))
    record = json.loads(lines[0])
    atom_id = record["memories"][0]["atom_id"]
    (folder / "renamed.jsonl").write_text(lines[0].replace(f'"{atom_id}"', '"other"')
                                          + "".join(lines[1:]))
    cases = {
        "drawn": draw("audit"), "twice": draw("audit"), "too_many": draw("b", num_random=10_000),
        "none": draw("b", num_random=0, num_stratified=0),
        "cut": draw("b", evaluation=folder / "cut"),
        "unfinished": draw("b", evaluation=folder / "unfinished"),
        "fewer": draw("b", eval_file=folder / "fewer.jsonl"),
        "renamed": draw("b", eval_file=folder / "renamed.jsonl"),
        "no_sheet": [f"--audit_dir={folder / 'b'}"],
        "empty": [f"--audit_dir={folder / 'audit'}"],
    }
    answers = dict(zip(cases, run_program("experiments.audit_judge", *cases.values()),
                       strict=True))
    # The annotator agrees with the judge but for the first random pair, which is one level off.
    sheet, key = read_csv(folder / "audit" / "sheet.csv"), read_csv(folder / "audit" / "key.csv")
    first = next(line["row"] for line in key if line["subset"] == "random")
    for line, answer in zip(sheet, key, strict=True):
        line[HUMAN_COLUMN] = answer["judged"]
        if line["row"] == first:
            line[HUMAN_COLUMN] = {"A": "B", "B": "A", "C": "B"}[answer["judged"]]
    write_csv(folder / "audit" / "sheet.csv", sheet)
    answers["read"], = run_program("experiments.audit_judge", [f"--audit_dir={folder / 'audit'}"])
    return answers


def test_the_sheet_and_its_key(audit, folder, records_file):
    assert audit["drawn"]["status"] == 0, audit["drawn"]["err"]
    sheet, key = read_csv(folder / "audit" / "sheet.csv"), read_csv(folder / "audit" / "key.csv")
    assert len(sheet) == len(key) == 19
    records = {record.id: record for record in load_records(records_file)}
    levels = [judged_levels(folder / "short", seed) for seed in range(2)]
    for line, answer in zip(sheet, key, strict=True):
        record = records[answer["record_id"]]
        atom = next(atom for atom in record.atoms if atom.id == answer["atom_id"])
        assert line["row"] == answer["row"] and line["atom"] == atom.text
        assert line["question"] == record.question
        assert answer["judged"] == levels[int(answer["seed"])][record.id][atom.id]
        assert answer["ideal"] == "ABC"[atom.ideal]
    assert not {"judged", "ideal", "subset"} & set(sheet[0])


def test_agreement_with_the_filled_sheet(audit, folder):
    assert audit["read"]["status"] == 0, audit["read"]["err"]
    found = json.loads((folder / "audit" / "agreement.json").read_text())
    assert (found["random"]["agreed"], found["random"]["total"]) == (9, 10)
    assert (found["stratified"]["agreed"], found["stratified"]["total"]) == (9, 9)
    assert found["stratified"]["kappa"] == 1.0
    assert "9 of 10 agree, 90.0% (95% Wilson interval 59.6 to 98.2)" in audit["read"]["out"]
    assert (folder / "audit" / "agreement.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("case, message", [
    ("twice", "sheet.csv is there already"), ("too_many", "lower --num_random"),
    ("none", "are both 0"), ("cut", "judgments.jsonl, line 4: no object with id"),
    ("unfinished", "results.json: cannot be read"), ("fewer", "not among the records"),
    ("renamed", "has other atoms than were judged"), ("no_sheet", "draw a sheet"),
    ("empty", "19 rows without a level: 1, 2, 3")])
def test_mistakes_of_an_audit(audit, folder, case, message):
    assert audit[case]["status"] == 2
    assert audit[case]["err"].startswith("error: ") and message in audit[case]["err"]
    assert not (folder / "b").exists()


@pytest.fixture(scope="module")
def rejudged(folder, run_program, other_judge_url):
    def flags(run_dir, *names, **changes):
        values = {"evaluations": ",".join(str(folder / name) for name in names),
                  "run_dir": folder / run_dir, "judge_url": other_judge_url,
                  "judge_model": OTHER} | changes
        return [f"--{name}={value}" for name, value in values.items()]

    shutil.copytree(folder / "long", folder / "elsewhere" / "short")
    other = load_results(folder / "long") | {"judge": {"model": "another"}}
    shutil.copytree(folder / "long", folder / "other")
    (folder / "other" / "results.json").write_text(json.dumps(other))
    cases = {"both": flags("rejudged", "short", "long"), "again": flags("rejudged", "short"),
             "same_name": flags("c", "short", "elsewhere/short"),
             "other_first_judge": flags("c", "short", "other"),
             "other_settings": flags("rejudged", "short", judge_temperature=0.5),
             "absent": flags("c", "absent")}
    answers = dict(zip(cases, run_program("experiments.rejudge", *cases.values()), strict=True))
    answers["comparison"] = answers["both"]["out"].split("first ")[1]
    return answers


def test_results_under_the_other_judge(rejudged, folder, records_file):
    assert rejudged["both"]["status"] == 0, rejudged["both"]["err"]
    ideal = {record.id: {atom.id: "ABC"[atom.ideal] for atom in record.atoms}
             for record in load_records(records_file)}
    for name in ("short", "long"):
        results = load_results(folder / "rejudged" / name)
        assert results["judge"]["model"] == OTHER and results["note"] is None
        assert results["settings"] == load_results(folder / name)["settings"]
        # Nothing is under-used, and each A or B atom is one step over.
        over = [sum(level != "C" for level in atoms.values()) for atoms in ideal.values()]
        for seed in results["overall"]["seeds"]:
            assert seed["sMUS"] == seed["AUR"] == 0
            assert seed["SCS"] == pytest.approx(sum(100 * 0.5**o for o in over) / len(over))
        up = {"A": "B", "B": "C", "C": "C"}
        for seed in range(2):
            assert judged_levels(folder / "rejudged" / name, seed) == {
                record: {atom: up[level] for atom, level in atoms.items()}
                for record, atoms in ideal.items()}


def test_agreement_of_the_judges(rejudged, folder):
    # Written last by the run with "short" alone.
    found = json.loads((folder / "rejudged" / "rejudge.json").read_text())
    pairs = [(first[record][atom], second[record][atom])
             for seed in range(2)
             for first, second in [(judged_levels(folder / "short", seed),
                                    judged_levels(folder / "rejudged" / "short", seed))]
             for record in first for atom in first[record]]
    same = sum(one == other for one, other in pairs)
    assert found["atoms"] == {"short": {
        "atoms": len(pairs), "same": same, "agreement": pytest.approx(100 * same / len(pairs)),
        "responses_left_out": 0}}
    assert found["judges"] == ["lexical-stand-in", OTHER] and found["metrics"] is None
    assert f"{100 * same / len(pairs):.1f}%" in rejudged["comparison"]


def test_correlations_over_evaluations(rejudged, folder):
    lines = {line.split()[0]: line.split()[1:] for line in rejudged["comparison"].splitlines()
             if line.startswith(("spearman", "pearson"))}
    for index, metric in enumerate(("SCS", "Exact", "sMOS", "sMUS", "AOR", "AUR")):
        values = [[load_results(folder / run / name)["overall"]["mean"][metric]
                   for name in ("short", "long")] for run in (".", "rejudged")]
        for kind, function in (("spearman", spearman), ("pearson", pearson)):
            expected = function(*values)
            shown = "-" if expected is None else f"{expected:.3f}"
            assert lines[kind][index] == shown


def test_what_is_judged_is_not_asked_again(rejudged, folder):
    assert rejudged["again"]["status"] == 0, rejudged["again"]["err"]
    journal = folder / "rejudged" / "short" / "seed_0" / "judgments.jsonl"
    assert len(journal.read_text().splitlines()) == 4


@pytest.mark.parametrize("case, message", [
    ("same_name", "two of --evaluations are called 'short'"),
    ("other_first_judge", "short and other were judged by different models"),
    ("other_settings", "--judge_temperature: 0.0 there, 0.5 now"),
    ("absent", "absent: cannot be read")])
def test_mistakes_of_rejudging(rejudged, folder, case, message):
    assert rejudged[case]["status"] == 2
    assert rejudged[case]["err"].startswith("error: ") and message in rejudged[case]["err"]
    assert not (folder / "c").exists()
