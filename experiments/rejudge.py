r"""Has another judge read the responses of evaluations again, and compares the two (H.3).

    python -m experiments.rejudge --evaluations=runs/base,runs/gdpo,runs/memcalib \
        --run_dir=runs/rejudged --judge_url=https://judge.example/v1 --judge_model=other-judge

Each evaluation's results under the other judge are in a folder of its name, as experiments.evaluate
writes them; rejudge.json holds the agreement. The same command resumes.
"""

import collections
import concurrent.futures
import pathlib

from absl import flags

from experiments import common, judging
from experiments.saved import Evaluation, read_evaluation
from memcalib_jax.evaluation import report
from memcalib_jax.evaluation.agreement import pearson, spearman
from memcalib_jax.evaluation.summary import METRICS, summarize
from memcalib_jax.files import write_atomically, write_json
from memcalib_jax.judge import Judgment
from memcalib_jax.training.advantages import judged_levels
from memcalib_jax.training.judging import Journal, JudgePool

FLAGS = flags.FLAGS

judging.define_flags()
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(judging)
flags.DEFINE_list("evaluations", None, "Folders of evaluations, with commas.", required=True)
flags.DEFINE_string("run_dir", None, "Folder for the other judge's judgments and results.",
                    required=True)
flags.DEFINE_string("eval_file", None, "The evaluations' records, if they are not where their "
                    "settings say.")

MAY_CHANGE = ("evaluations", "eval_file", "run_dir", "judge_url", "judge_timeout",
              "judge_attempts", "judge_concurrency", "judge_requests_per_minute",
              "judge_cache_dir")

SECONDS_BETWEEN_LINES = 10.0


def main():
    run_dir = pathlib.Path(FLAGS.run_dir)
    evaluations = {}
    for folder in FLAGS.evaluations:
        evaluation = read_evaluation(folder, FLAGS.eval_file)
        name = evaluation.folder.resolve().name
        if name in evaluations:
            raise common.UsageError(f"two of --evaluations are called {name!r}: rename one")
        evaluations[name] = evaluation
    check_comparable(evaluations)
    judge, client, background = judging.open_judge(run_dir)
    common.claim_run_dir(run_dir, common.flag_values(), may_change=MAY_CHANGE)

    results, agreement = {}, {}
    for name, evaluation in evaluations.items():
        judgments = judge_again(name, evaluation, judge, background, run_dir / name)
        agreement[name] = atom_agreement(evaluation.judgments, judgments)
        results[name] = results_of(evaluation, judgments)
        write_atomically(run_dir / name / "results.png", report.picture(results[name]))
        write_json(run_dir / name / "results.json", results[name])
    background.submit(client.aclose()).result()
    background.close()
    comparison = {
        "judges": [next(iter(evaluations.values())).results["judge"]["model"], FLAGS.judge_model],
        "note": report.judge_note(FLAGS.judge_model),
        "atoms": agreement,
        "metrics": correlations([evaluation.results for evaluation in evaluations.values()],
                                list(results.values())),
    }
    write_json(run_dir / "rejudge.json", comparison)
    print(f"\n{table(evaluations, results, comparison)}\n\nrejudge.json, and each evaluation's "
          f"results.json, are in {run_dir}")


def check_comparable(evaluations: dict[str, Evaluation]):
    """Refuses evaluations that differ in judge or records.

    Raises:
      UsageError: names two that do.
    """
    (first_name, first), *others = evaluations.items()
    for name, evaluation in others:
        if evaluation.results["judge"]["model"] != first.results["judge"]["model"]:
            raise common.UsageError(f"{first_name} and {name} were judged by different models")
        if [record.id for record in evaluation.records] != [record.id for record in first.records]:
            raise common.UsageError(f"{first_name} and {name} answer different records")


def judge_again(name, evaluation, judge, background, folder) -> list[list[Judgment]]:
    """Returns the other judge's judgments, `[seed][record]`."""
    pools = []
    for seed, texts in enumerate(evaluation.texts):
        journal = Journal(folder / f"seed_{seed}" / "judgments.jsonl", retry_failed=True)
        pool = JudgePool(judge, background, journal, first_sample=seed)
        for record, text in zip(evaluation.records, texts, strict=True):
            pool.submit(record, 0, text)
        pools.append((pool, journal))
    futures = [future for pool, _ in pools for _, future in pool.submitted]
    pending = set(futures)
    while pending:
        pending = concurrent.futures.wait(pending, timeout=SECONDS_BETWEEN_LINES).not_done
        print(f"{name}  judged {len(futures) - len(pending)}/{len(futures)}", flush=True)
    for _, journal in pools:
        journal.close()
    return [[future.result() for _, future in pool.submitted] for pool, _ in pools]


def results_of(evaluation: Evaluation, judgments: list[list[Judgment]]) -> dict:
    """Returns the evaluation's results as they are under other judgments.

    Raises:
      UsageError: a seed has no valid judgment.
    """
    seeds = []
    for counts, row in zip(evaluation.results["seeds"], judgments, strict=True):
        reasons = collections.Counter(
            judgment.reason.split(":")[0] for judgment in row if not judgment.valid)
        seeds.append(counts | {"valid": len(row) - reasons.total(),
                               "invalid": dict(sorted(reasons.items()))})
        if not seeds[-1]["valid"]:
            raise common.UsageError(
                f"{evaluation.folder}, seed {counts['seed']}: none of {len(row)} responses has a "
                f"valid judgment ({dict(reasons)}); check the judge, then start the same command "
                "again")
    levels = judged_levels(evaluation.records, list(zip(*judgments)))
    return evaluation.results | {
        "note": report.judge_note(FLAGS.judge_model),
        "judge": {"model": FLAGS.judge_model},
        "seeds": seeds,
        **summarize(levels.ideal_P_G_A, levels.actual_P_G_A, levels.atom_mask_P_G_A,
                    levels.valid_P_G, [record.domain for record in evaluation.records]),
    }


def atom_agreement(first: list[list[Judgment]], second: list[list[Judgment]]) -> dict:
    """Counts the atoms that two judges put at one level, `[seed][record]`.

    Responses that one of them could not judge are left out, and counted.
    """
    pairs = [pair for rows in zip(first, second, strict=True) for pair in zip(*rows, strict=True)]
    both = [(one.levels, other.levels) for one, other in pairs if one.valid and other.valid]
    same = [left == right for one, other in both for left, right in zip(one, other, strict=True)]
    return {"atoms": len(same), "same": sum(same),
            "agreement": 100.0 * sum(same) / len(same) if same else None,
            "responses_left_out": len(pairs) - len(both)}


def correlations(first: list[dict], second: list[dict]) -> dict | None:
    """Correlates each metric's mean over seeds over evaluations; None for a single evaluation."""
    if len(first) < 2:
        return None
    means = {name: [[results["overall"]["mean"][name] for results in side]
                    for side in (first, second)] for name in METRICS}
    return {name: {"spearman": spearman(*values), "pearson": pearson(*values)}
            for name, values in means.items()}


def table(evaluations: dict[str, Evaluation], results: dict[str, dict], comparison: dict) -> str:
    """Lays both judges' figures out as plain text."""
    lines = [f"first {comparison['judges'][0]}, then {comparison['judges'][1]}"]
    lines += [comparison["note"]] if comparison["note"] else []
    width = max(len("evaluation"), *map(len, evaluations)) + 2
    lines += ["", f"{'evaluation':<{width}}" + "".join(f"{name:>16}" for name in METRICS)
              + f"{'same atoms':>12}"]
    for name, evaluation in evaluations.items():
        means = [side["overall"]["mean"] for side in (evaluation.results, results[name])]
        share = comparison["atoms"][name]["agreement"]
        lines.append(f"{name:<{width}}" + "".join(
            f"{f'{means[0][metric]:.2f} {means[1][metric]:.2f}':>16}" for metric in METRICS)
            + f"{'-' if share is None else f'{share:.1f}%':>12}")
    for kind in ("spearman", "pearson") if comparison["metrics"] else ():
        values = [comparison["metrics"][name][kind] for name in METRICS]
        lines.append(f"{kind:<{width}}" + "".join(
            f"{'-' if value is None else f'{value:.3f}':>16}" for value in values))
    return "\n".join(lines)


if __name__ == "__main__":
    common.run(main)
