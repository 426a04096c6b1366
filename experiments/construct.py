r"""Builds a MemCalib benchmark from question-answer sources, in six stages (B.1).

    python -m experiments.construct --stand_in --run_dir=runs/built    # our sample, no model
    python -m experiments.construct --sources=meddialog:med.json,apps:apps.jsonl \
        --generator_url=https://llm.example/v1 --generator_model=some-model \
        --reviewer_models=some-model,other-model --run_dir=runs/built

Sources are PATH, FORMAT:PATH or FORMAT@DOMAIN:PATH. The same command goes on after any end.
"""

import asyncio
import dataclasses
import pathlib
import time

from absl import flags

from experiments import calls, common, pilots
from memcalib_jax import construction
from memcalib_jax.construction.admission import Admission
from memcalib_jax.construction.benchmark import (
    composition_rows, lines_of, make_record, structure_rows, without_near_identical)
from memcalib_jax.construction.freezing import pipeline_hash, pipeline_parts
from memcalib_jax.construction.journal import FAILED, REJECTED
from memcalib_jax.construction.layout import LayoutLimits
from memcalib_jax.construction.pipeline import STAGES, Pipeline, Step, construction_steps
from memcalib_jax.construction.screening import ScreeningLimits
from memcalib_jax.construction.sources import FORMATS, SourceFile, check_field_map
from memcalib_jax.data import load_records
from memcalib_jax.files import write_atomically, write_json

FLAGS = flags.FLAGS

calls.define_call_flags()
flags.adopt_module_key_flags(calls)
flags.DEFINE_string("run_dir", None, "Folder of the run; an earlier run there is resumed.",
                    required=True)
flags.DEFINE_list("sources", None, "Source files: PATH, FORMAT:PATH or FORMAT@DOMAIN:PATH; "
                  f"formats: {', '.join(FORMATS)}. Default: the built-in sample.")
flags.DEFINE_list("field_map", [], "For plain files, field=KEY (or field==CONSTANT) with commas; "
                  "fields: id, source, domain, context, question, reference_answer.")
flags.DEFINE_integer("max_per_domain", None, "Most sources of each domain.", lower_bound=1)
flags.DEFINE_list("stages", list(STAGES), "Stages that may run now.")
flags.DEFINE_integer("seed", 0, "Seed of block sizes and places.", lower_bound=0)
for _name, _what in (("blocks", "blocks of a sample"), ("atoms", "atoms of a block")):
    _default = LayoutLimits()
    flags.DEFINE_integer(f"min_{_name}", getattr(_default, f"min_{_name}"), f"Fewest {_what}.",
                         lower_bound=1)
    flags.DEFINE_integer(f"max_{_name}", getattr(_default, f"max_{_name}"), f"Most {_what}.",
                         lower_bound=1)
flags.DEFINE_boolean("pilot", False, "Build a small batch for people to review, or read their "
                     "reviews and freeze the pipeline; --run_dir is of all rounds.")
flags.DEFINE_integer("pilot_size", 50, "Samples of a pilot round.", lower_bound=3)
flags.DEFINE_string("frozen", None, "The --run_dir of the pilot that froze this pipeline.")
flags.DEFINE_float("alike", 0.9, "Share of words in common from which on two queries are nearly "
                   "identical; the later one is left out.", lower_bound=0.01, upper_bound=1)

MAY_CHANGE = (*calls.MAY_CHANGE, "stages", "alike")
# What a pilot is there to revise.
PILOT_MAY_CHANGE = (*MAY_CHANGE, "pipeline", "sources", "source_hashes", "pilot_size",
                    "generator_model", "reviewer_models", "generator_temperature",
                    "call_max_tokens", "min_blocks", "max_blocks", "min_atoms", "max_atoms")


def main():
    run_dir = pathlib.Path(FLAGS.run_dir)
    files, field_map = source_files()
    unknown = [stage for stage in FLAGS.stages if stage not in STAGES]
    if unknown:
        raise common.UsageError(f"--stages: {unknown[0]!r} is none of {', '.join(STAGES)}")
    prompts, layout = calls.read_prompts(), read_layout()
    parts = pipeline_parts(prompts, {
        "models": calls.models(), "temperature": FLAGS.generator_temperature,
        "max_tokens": FLAGS.call_max_tokens, "screening": dataclasses.asdict(ScreeningLimits()),
        "layout": dataclasses.asdict(layout)})
    name = pipeline_hash(parts)
    if FLAGS.frozen:
        pilots.check_frozen(FLAGS.frozen, parts)
    with calls.open_session(run_dir, prompts) as session:
        hashes = [calls.digest(file.path) for file in files]
        common.claim_run_dir(
            run_dir, common.flag_values() | {"pipeline": name, "source_hashes": hashes},
            may_change=PILOT_MAY_CHANGE if FLAGS.pilot else MAY_CHANGE)
        admission = Admission.open(run_dir, files, hashes, field_map, ScreeningLimits(),
                                   FLAGS.max_per_domain)
        print(f"pipeline {name}: {admission.total} sources admitted "
              f"{dict(admission.by_domain)}, refused {admission.refused.total()} "
              f"{dict(admission.refused)}", flush=True)
        if not admission.total:
            raise common.UsageError(f"no row of --sources was admitted; {run_dir}/refused.jsonl "
                                    "says why of each")
        steps = construction_steps(session.generator, session.reviewers, layout)
        if FLAGS.pilot:
            pilots.next_step(run_dir, parts, admission, FLAGS.pilot_size, FLAGS.seed, steps,
                             session)
        else:
            build(run_dir, name, admission, steps, session)


def build(run_dir: pathlib.Path, name: str, admission: Admission, steps: dict[str, Step],
          session: calls.Session):
    """Takes every admitted sample through the stages, and writes the benchmark."""
    pipeline = Pipeline(run_dir / "stages", steps, FLAGS.stages)
    started = time.monotonic()
    asyncio.run(session.run(
        pipeline.run(admission.samples(), at_once=FLAGS.concurrency),
        lambda: session.progress(pipeline, admission.total, time.monotonic() - started)))
    session.check_budget()
    if "assurance" in FLAGS.stages:
        assemble(run_dir, admission, pipeline, name)
    pipeline.close()


def source_files() -> tuple[list[SourceFile], dict[str, str]]:
    """Reads --sources and --field_map.

    Raises:
      UsageError: a format, field or file is none.
    """
    try:
        files = [SourceFile.parse(text) for text in
                 FLAGS.sources or construction.sample_paths()]
        wrong = [text for text in FLAGS.field_map if "=" not in text]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no field=KEY")
        field_map = dict(text.split("=", 1) for text in FLAGS.field_map)
        check_field_map(field_map)
    except ValueError as error:
        raise common.UsageError(f"--sources or --field_map: {error}") from None
    for file in files:
        if not pathlib.Path(file.path).is_file():
            raise common.UsageError(f"--sources: there is no file {file.path}")
    return files, field_map


def read_layout() -> LayoutLimits:
    """Returns the layout of the flags.

    Raises:
      UsageError: a least exceeds its most.
    """
    try:
        return LayoutLimits(FLAGS.min_blocks, FLAGS.max_blocks, FLAGS.min_atoms, FLAGS.max_atoms,
                            FLAGS.seed)
    except ValueError as error:
        raise common.UsageError(str(error)) from None


def assemble(run_dir: pathlib.Path, admission: Admission, pipeline: Pipeline, name: str):
    """Writes the benchmark and its statistics, and says what did not make it."""
    finished = (pipeline.finished(sample) for sample in admission.samples())
    records = [make_record(sample, name, bool(FLAGS.frozen)) for sample in finished if sample]
    records, twins = without_near_identical(records, FLAGS.alike)
    rejected, failed = (pipeline.counts_of(kind) for kind in (REJECTED, FAILED))
    write_json(run_dir / "summary.json", {
        "pipeline": name, "refused": dict(admission.refused), "rejected": dict(rejected),
        "failed": dict(failed), "near_identical_queries": dict(twins), "records": len(records)})
    if not records:
        raise common.UsageError(f"no sample passed all stages: rejected {dict(rejected)}, failed "
                                f"{dict(failed)}; the details are in {run_dir}/stages")
    path = run_dir / "benchmark.jsonl"
    write_atomically(path, b"".join(lines_of(records)))
    loaded = load_records(path)
    print(f"\nrejected {dict(rejected)}\n{table(composition_rows(loaded), COMPOSITION)}\n\n"
          f"{table(structure_rows(loaded), STRUCTURE)}\n\n{len(loaded)} records are in {path}")
    if failed:
        print(f"endpoints failed {failed.total()} samples ({dict(failed)}); the same command asks "
              "for them again")


COMPOSITION = ["domain", "examples", "blocks", "atoms"]
STRUCTURE = ["domain", "Ignore", "Bound", "Control", "mixed-target", "atoms/block", "atoms/example"]


def table(rows: list[list[str]], header: list[str]) -> str:
    """Lays rows of text out in columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *(
        cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]) for row in [header, *rows])


if __name__ == "__main__":
    common.run(main)
