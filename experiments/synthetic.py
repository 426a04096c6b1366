r"""Shows learning in minutes: the slots benchmark, which needs neither a model nor a judge.

    python -m experiments.synthetic --study_dir=runs/synthetic --seeds=0,1,2 \
        --arms=grpo@0.05,gdpo@0.05,memcalib@0.05,guarded@0.05

Records whose right use a hidden rule decides, a judge that reads it off the response, and a model
of 150,000 parameters go through the library's own prompts, sampler, counterfactual pass, credit
and updates. Each seed makes its cold start, from which each arm, a method with its KL weight, is
trained. The same command goes on where it was stopped; more arms and seeds may be added, and
processes with different seeds may share a folder. Writes study.md, study.json, learning.png and
watch.png of all runs that are finished.
"""

import dataclasses
import fcntl
import pathlib

from absl import flags

from experiments import common
from memcalib_jax.files import write_atomically, write_json
from memcalib_jax.synthetic import figures, summary
from memcalib_jax.synthetic.arms import Arm, Training, measure_start, run_arm
from memcalib_jax.synthetic.cold_start import ColdStart, make_cold_start
from memcalib_jax.synthetic.vocabulary import build_tokenizer
from memcalib_jax.training.rollouts import Policy

FLAGS = flags.FLAGS

common.define_cache_flag()
flags.adopt_module_key_flags(common)
flags.DEFINE_string("study_dir", None, "Folder of the study; what an earlier command finished "
                    "there is not done again.", required=True)
flags.DEFINE_list("arms", ["grpo@0.05", "gdpo@0.05", "memcalib@0.05", "guarded@0.05"],
                  "What to compare: grpo, gdpo, memcalib or a mode of memcalib, each with @ and "
                  "the weight of its KL penalty.")
flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, each with a cold start of its own.")
flags.DEFINE_integer("num_steps", 60, "Steps of each run.", lower_bound=1)
flags.DEFINE_integer("echo_steps", ColdStart.echo_steps, "Steps of the cold start in which the "
                     "model learns to copy.", lower_bound=1)
flags.DEFINE_integer("habit_steps", ColdStart.habit_steps, "Steps in which it takes up habits.",
                     lower_bound=1)
flags.DEFINE_integer("num_prompts", Training.num_prompts, "Prompts of a step, 8 responses each; a "
                     "multiple of 8.", lower_bound=8)
flags.DEFINE_integer("eval_records", Training.eval_records, "Fresh records of an evaluation.",
                     lower_bound=1)


def main():
    arms, seeds = _arms(), _seeds()
    if FLAGS.num_prompts * Training.group_size % Training.mini_batch_size:
        raise common.UsageError(f"--num_prompts={FLAGS.num_prompts} must be a multiple of "
                                f"{Training.mini_batch_size // Training.group_size}")
    folder = pathlib.Path(FLAGS.study_dir)
    training = Training(num_steps=FLAGS.num_steps, num_prompts=FLAGS.num_prompts,
                        eval_records=FLAGS.eval_records)
    start_settings = ColdStart(echo_steps=FLAGS.echo_steps, habit_steps=FLAGS.habit_steps)
    for seed in seeds:
        waiting = [arm for arm in arms if not _is_done(_run_dir(folder, arm, seed))]
        if not waiting:
            continue
        start, measured = _start(folder, start_settings, training, seed)
        for arm in waiting:
            _train(_run_dir(folder, arm, seed), arm, training, start, measured, seed)
    _show(folder)


def _arms() -> list[Arm]:
    try:
        return [Arm.parse(text) for text in FLAGS.arms]
    except ValueError as error:
        raise common.UsageError(f"--arms: {error}") from None


def _seeds() -> list[int]:
    try:
        seeds = [int(text) for text in FLAGS.seeds]
    except ValueError:
        seeds = [-1]
    if min(seeds, default=-1) < 0 or len(set(seeds)) < len(seeds):
        raise common.UsageError(f"--seeds={','.join(FLAGS.seeds)} must be different whole numbers "
                                "from 0 on")
    return seeds


def _run_dir(folder: pathlib.Path, arm: Arm, seed: int) -> pathlib.Path:
    return folder / "runs" / str(arm) / f"seed_{seed}"


def _is_done(run_dir: pathlib.Path) -> bool:
    try:
        return summary.read_summary(run_dir)["num_steps"] >= FLAGS.num_steps
    except FileNotFoundError:
        return False


def _start(folder, settings: ColdStart, training: Training,
           seed: int) -> tuple[Policy, dict[str, float]]:
    """Returns a seed's cold start and its metrics."""
    run_dir = folder / "cold_starts" / f"seed_{seed}"
    common.claim_run_dir(run_dir, dataclasses.asdict(settings) | {"seed": seed}, may_change=())
    start = make_cold_start(run_dir, settings, build_tokenizer(), seed, _every(100))
    measured = measure_start(start, training, seed)
    print(f"seed {seed}: cold start with SCS {measured['SCS']:.1f}, over {measured['sMOS']:.1f}, "
          f"under {measured['sMUS']:.1f}", flush=True)
    return start, measured


def _every(steps: int):
    """Returns what prints one in so many of a run's lines of progress."""
    def report(line: str):
        number = line.partition("step ")[2].partition("/")[0]
        told = int(number) % steps == 0 if number.isdigit() else "first step:" not in line
        if told:
            print(line, flush=True)

    return report


def _train(run_dir, arm: Arm, training: Training, start: Policy, measured, seed: int):
    config = dataclasses.asdict(training) | dataclasses.asdict(arm) | {"seed": seed}
    common.claim_run_dir(run_dir, config, may_change=("num_steps",))
    report = _every(10)
    run_arm(run_dir, arm, training, start, seed, lambda line: report(f"{arm}, {seed}: {line}"))
    write_json(run_dir / summary.SUMMARY, summary.summarize_run(run_dir, arm, seed, measured))


def _show(folder: pathlib.Path):
    with (folder / ".lock").open("w") as lock:  # other processes' seeds may end just now
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = summary.load_runs(folder / "runs")
        write_json(folder / "study.json", {
            "cold_starts": summary.start_columns(runs), "arms": summary.by_arm(runs),
            "more_than_memcalib": summary.differences(runs)})
        text = summary.markdown(runs)
        write_atomically(folder / "study.md", (text + "\n").encode())
        write_atomically(folder / "learning.png", figures.learning_picture(runs))
        write_atomically(folder / "watch.png", figures.watch_picture(runs))
    print(f"\n{text}\n\nstudy.md, study.json, learning.png and watch.png are in {folder}")


if __name__ == "__main__":
    common.run(main)
