r"""Evaluates transfer to RPEval, whose preferences are the memories (G, arXiv 2609.24259).

    python -m experiments.evaluate_rpeval --run_dir=runs/rpeval \
        --eval_file=explicit_preference/multi_testset.json \
        --judge_url=https://api.deepseek.com/v1 --judge_model=deepseek-v4-pro

Responses are drawn at temperature 1, and the judge, who sees neither targets nor rubrics, answers
at --judge_temperature=1. The same command resumes; --checkpoint, --policy_url and --responses_file
are as for evaluate.
"""

import json
import pathlib

from absl import flags

from experiments import answering, common, devices, judging, policies
from memcalib_jax.evaluation import report, rpeval
from memcalib_jax.files import write_json
from memcalib_jax.judge import Judge, load_instructions
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
FLAGS.set_default("judge_temperature", 1.0)
flags.DEFINE_string("eval_file", None, "RPEval's explicit_preference/multi_testset.json.",
                    required=True)
flags.DEFINE_integer("num_seeds", 3, "Responses to each record.", lower_bound=1)
flags.DEFINE_bool("dry_run", False, "Check everything, print the settings, and stop.")


def main():
    run_dir = pathlib.Path(FLAGS.run_dir)
    records = rpeval.load_rpeval(FLAGS.eval_file)
    setup = policies.set_up(records, "fluent", "RPEval",
                            SamplingConfig(1, FLAGS.max_response_tokens), run_dir)
    prompts, config = setup.prompts, setup.config
    print(json.dumps(config, indent=2))
    _, client, background = judging.open_judge(run_dir)
    judge = Judge(client, load_instructions(FLAGS.judge_prompt_file) if FLAGS.judge_prompt_file
                  else rpeval.INSTRUCTIONS, blind=True)
    if FLAGS.dry_run:
        print(f"dry run: {len(prompts)} prompts x {FLAGS.num_seeds} seeds; all checks passed")
        return
    common.claim_run_dir(run_dir, config, may_change=answering.MAY_CHANGE)
    if not multihost.is_main():
        return answering.sample_along(setup, FLAGS.num_seeds)

    seeds = answering.open_seeds(run_dir, FLAGS.num_seeds, prompts, judge, background)
    counts, judgments = answering.answer(seeds, setup, "Micro", rpeval.preference_metrics)
    levels = answering.levels(prompts, counts, judgments)

    results = {
        "format": rpeval.FORMAT, "note": report.judge_note(FLAGS.judge_model),
        **setup.origin(),
        "judge": {"model": FLAGS.judge_model, "statistics": client.stats()},
        "records": answering.counted(len(records), prompts),
        "seeds": counts,
        "overall": rpeval.summarize(levels.ideal_P_G_A, levels.actual_P_G_A,
                                    levels.atom_mask_P_G_A, levels.valid_P_G),
        "settings": config,
    }
    write_json(run_dir / "results.json", results)
    background.submit(client.aclose()).result()
    background.close()
    print(f"\n{rpeval.table(results)}\n\nresults.json and every response and judgment are in "
          f"{run_dir}")


if __name__ == "__main__":
    common.run(main)
