r"""Evaluates how a model uses memory: answers each record under several seeds, judges, sums up.

    python -m experiments.evaluate --run_dir=runs/base --judge_url=http://127.0.0.1:8000/v1 \
        --judge_model=my-judge --eval_file=test.jsonl

The same command resumes an evaluation that was stopped; judgments that failed are asked again.
With --checkpoint=RUN_DIR the parameters are those of a training run's newest checkpoint. Other
policies answer as --policy_url and --policy_model, or have answered in --responses_file (2.4,
arXiv 2609.24259).
"""

import json
import pathlib

from absl import flags

from experiments import answering, common, devices, judging, policies
from memcalib_jax.evaluation import report
from memcalib_jax.evaluation.metrics import calibration_metrics
from memcalib_jax.evaluation.summary import summarize
from memcalib_jax.files import write_atomically, write_json
from memcalib_jax.parallel import multihost
from memcalib_jax.training.rollouts import SamplingConfig

FLAGS = flags.FLAGS

common.define_model_flags()
judging.define_flags()
policies.define_policy_flags()
devices.define_flags()
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(judging)
flags.adopt_module_key_flags(policies)
flags.adopt_module_key_flags(devices)
flags.DEFINE_string("eval_file", None, "Records to evaluate on (JSONL); default: 12 sample records "
                    "that training without --train_file leaves out.")
flags.DEFINE_enum("representation", "fluent", ["atomic", "fluent"],
                  "How prompts word their memories.")
flags.DEFINE_integer("num_seeds", 3, "Responses to each record.", lower_bound=1)
flags.DEFINE_float("temperature", 1.0, "Temperature of the responses; 0: the most likely token.",
                   lower_bound=0)
flags.DEFINE_float("top_p", 1.0, "Nucleus of the responses.", lower_bound=0, upper_bound=1)
flags.DEFINE_bool("dry_run", False, "Check everything, print the settings, and stop.")


def main():
    # Everything that can be wrong with flags, files and the endpoint is found before the model
    # is loaded.
    if FLAGS.top_p <= 0:
        raise common.UsageError("--top_p must be in (0, 1]")
    run_dir = pathlib.Path(FLAGS.run_dir)
    records = common.read_records(FLAGS.eval_file, held_out=True)
    sampling = SamplingConfig(1, FLAGS.max_response_tokens, temperature=FLAGS.temperature,
                              top_p=FLAGS.top_p)
    setup = policies.set_up(records, FLAGS.representation, "evaluation", sampling, run_dir)
    prompts, config = setup.prompts, setup.config
    print(json.dumps(config, indent=2))
    judge, client, background = judging.open_judge(run_dir)
    if FLAGS.dry_run:
        print(f"dry run: {len(prompts)} prompts x {FLAGS.num_seeds} seeds; all checks passed")
        return
    common.claim_run_dir(run_dir, config, may_change=answering.MAY_CHANGE)
    if not multihost.is_main():
        return answering.sample_along(setup, FLAGS.num_seeds)

    seeds = answering.open_seeds(run_dir, FLAGS.num_seeds, prompts, judge, background)
    counts, judgments = answering.answer(seeds, setup, "SCS", calibration_metrics)
    levels = answering.levels(prompts, counts, judgments)

    results = {
        "format": report.FORMAT, "note": report.judge_note(FLAGS.judge_model),
        **setup.origin(),
        "judge": {"model": FLAGS.judge_model, "statistics": client.stats()},
        "records": answering.counted(len(records), prompts),
        "seeds": counts,
        **summarize(levels.ideal_P_G_A, levels.actual_P_G_A, levels.atom_mask_P_G_A,
                    levels.valid_P_G, [prompt.record.domain for prompt in prompts]),
        "settings": config,
    }
    write_atomically(run_dir / "results.png", report.picture(results))
    write_json(run_dir / "results.json", results)
    background.submit(client.aclose()).result()
    background.close()
    print(f"\n{report.table(results)}\n\nresults.json, results.png and every response and judgment "
          f"are in {run_dir}")


if __name__ == "__main__":
    common.run(main)
