"""Pilot rounds of a construction: what lies in their folder, and what comes next."""

import asyncio
import json
import pathlib
from collections import Counter

from experiments import calls, common
from memcalib_jax.construction.admission import Admission
from memcalib_jax.construction.freezing import differences, pipeline_hash
from memcalib_jax.construction.pilot import (
    PASS_RATE, fresh_order, is_filled, quotas, read_sheet, review_page, review_sheet)
from memcalib_jax.construction.journal import FAILED, REJECTED
from memcalib_jax.construction.pipeline import Pipeline, Step
from memcalib_jax.files import write_atomically, write_json
from memcalib_jax.jsonlines import DamagedFile

FROZEN = "frozen.json"


def check_frozen(folder: str, parts: dict[str, str]):
    """Refuses to build with another pipeline than the one that passed the pilot.

    Raises:
      UsageError: the pilot has not passed, or names the parts that differ.
    """
    path = pathlib.Path(folder) / FROZEN
    if not path.exists():
        raise common.UsageError(f"--frozen={folder}: no pipeline is frozen there; give the "
                                "--run_dir of a --pilot that has passed")
    changed = differences(_read(path, "parts"), parts)
    if changed:
        raise common.UsageError(f"--frozen={folder}: this is another pipeline; what differs: "
                                f"{', '.join(changed)}")


def next_step(run_dir: pathlib.Path, parts: dict[str, str], admission: Admission, size: int,
              seed: int, steps: dict[str, Step], session: calls.Session):
    """Reads the newest round's sheet, if it is filled in, or builds the next round.

    Raises:
      UsageError: the sheet will not do, or there are too few sources for a round.
    """
    rounds = _rounds(run_dir)
    if (run_dir / FROZEN).exists():
        name = _read(run_dir / FROZEN, "pipeline")
        print(f"pipeline {name} is frozen; build with --frozen={run_dir}")
        return
    if rounds and (rounds[-1] / "samples.json").exists():
        if not (rounds[-1] / "sheet.csv").exists():
            _lay_out(rounds[-1])
            return
        outcome = _outcome(rounds[-1])
        if outcome is None:
            print(f"fill in {rounds[-1] / 'sheet.csv'} while reading {rounds[-1] / 'page.html'}, "
                  "then give the same command")
            return
        if not _judge(run_dir, rounds[-1], outcome, parts):
            return
        rounds.append(run_dir / f"round_{int(rounds[-1].name[6:]) + 1}")
    folder = rounds[-1] if rounds else run_dir / "round_1"
    started = folder / "pipeline.json"
    if started.exists() and differences(_read(started), parts):
        raise common.UsageError(f"{folder} was begun with another pipeline: remove that folder, "
                                "or go back to its prompts")
    write_json(started, parts)
    _build(run_dir, folder, admission, size, seed, steps, session)


def _rounds(run_dir):
    folders = (path for path in run_dir.glob("round_*") if path.name[6:].isdecimal())
    return sorted(folders, key=lambda path: int(path.name[6:]))


def _lay_out(folder):
    samples = _read(folder / "samples.json")
    page = review_page(samples, f"Pilot {folder.name}")
    write_atomically(folder / "page.html", page.encode())
    # The mark makes spreadsheets read UTF-8.
    write_atomically(folder / "sheet.csv", review_sheet(samples).encode("utf-8-sig"))
    print(f"{len(samples)} samples are in {folder}: read page.html, fill in sheet.csv, then give "
          "the same command")


def _outcome(folder):
    samples = _read(folder / "samples.json")
    try:
        text = (folder / "sheet.csv").read_text(encoding="utf-8-sig")
        return read_sheet(text, samples) if is_filled(text) else None
    except UnicodeDecodeError:
        raise common.UsageError(f"{folder / 'sheet.csv'} is no UTF-8: save it as CSV "
                                "UTF-8") from None
    except ValueError as error:
        raise common.UsageError(f"{folder / 'sheet.csv'}: {error}") from None


def _judge(run_dir, folder, outcome, parts) -> bool:
    """Freezes the pipeline, or says what to mend; True where a new round is to be built."""
    built_with = _read(folder / "pipeline.json")
    write_json(folder / "outcome.json", {
        "passed": outcome.passed, "total": outcome.total, "pass_rate": outcome.pass_rate,
        "issues_by_stage": outcome.by_stage,
        "issues": [dict(zip(("id", "stage", "issue"), issue)) for issue in outcome.issues]})
    print(f"{folder.name}: {outcome.passed} of {outcome.total} samples pass "
          f"({100 * outcome.pass_rate:.0f}%); issues by stage: {outcome.by_stage or 'none'}")
    if outcome.pass_rate >= PASS_RATE:
        name = pipeline_hash(built_with)
        write_json(run_dir / FROZEN, {"pipeline": name, "round": folder.name, "parts": built_with,
                                      "pass_rate": outcome.pass_rate})
        print(f"pipeline {name} is frozen; build with --frozen={run_dir}")
        return False
    changed = differences(built_with, parts)
    if not changed:
        worst = next(iter(outcome.by_stage))
        print(f"{100 * PASS_RATE:.0f}% are needed: revise the prompts of the stages with issues, "
              f"{worst} first, in a --prompts_dir (or settings), then give the command again for a "
              "fresh round")
        return False
    print(f"since then these changed: {', '.join(changed)}; a fresh round follows")
    return True


def _build(run_dir, folder, admission, size, seed, steps, session):
    used = {sample["id"] for earlier in _rounds(run_dir)[:-1]
            for sample in _read(earlier / "samples.json")}
    wanted = Counter(quotas(size))
    domain_of = {sample["id"]: sample["domain"] for sample in admission.samples()}
    pipeline = Pipeline(folder / "stages", steps)
    # What passed before an end of this round comes first: it is paid for.
    order = sorted(fresh_order([id for id in domain_of if id not in used], seed),
                   key=lambda id: not pipeline.has_passed(id))
    fresh = {domain: iter([id for id in order if domain_of[id] == domain]) for domain in wanted}
    chosen: list[str] = []

    def line():
        done = Counter(domain_of[id] for id in chosen if pipeline.has_passed(id))
        return f"{folder.name}: passed {dict(done)} of {dict(wanted)}  {session.spent()}"

    async def fill():
        """Begins so many samples as are missing, again and again, until none is."""
        while not session.stopping:
            missing = wanted - Counter(domain_of[id] for id in chosen if pipeline.has_passed(id))
            wave = [id for domain, count in missing.items() for id, _ in
                    zip(fresh[domain], range(count))]
            if not wave:
                return
            chosen.extend(wave)
            picked = set(wave)
            await pipeline.run((sample for sample in admission.samples()
                                if sample["id"] in picked), at_once=len(wave))

    asyncio.run(session.run(fill(), line))
    passed = [id for id in chosen if pipeline.has_passed(id)]
    session.check_budget()
    if len(passed) < size:
        have = dict(Counter(domain_of[id] for id in passed))
        raise common.UsageError(f"the sources are used up: {have} of {dict(wanted)} samples passed "
                                f"(rejected {dict(pipeline.counts_of(REJECTED))}, failed "
                                f"{dict(pipeline.counts_of(FAILED))}); give more --sources "
                                "behind these, or a smaller --pilot_size")
    finished = {sample["id"]: pipeline.finished(sample) for sample in admission.samples()
                if sample["id"] in set(passed)}
    pipeline.close()
    write_json(folder / "samples.json", [finished[id] for id in passed])
    _lay_out(folder)


def _read(path, key=None):
    try:
        value = json.loads(path.read_text())
        return value if key is None else value[key]
    except (ValueError, TypeError, KeyError):
        raise DamagedFile(f"{path} is damaged: put back what this program wrote") from None
