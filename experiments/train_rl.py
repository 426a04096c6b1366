r"""Trains a model to use memory at the right level: MemCalib-RL, GDPO or GRPO.

    python -m experiments.train_rl --run_dir=runs/first --judge_url=http://127.0.0.1:8000/v1 \
        --judge_model=my-judge --train_file=train.jsonl

The same command resumes a run that was stopped. Defaults are the paper's (E.2, arXiv 2609.24259).
"""

import json
import pathlib

import jax.numpy as jnp
from absl import flags

from experiments import common
from memcalib_jax.credit import CreditConfig
from memcalib_jax.models import load, load_config, load_tokenizer
from memcalib_jax.models.weights.peft import save_adapter
from memcalib_jax.training.advantages import METHODS
from memcalib_jax.training.loop import LoopConfig, train
from memcalib_jax.training.rollouts import Policy, SamplingConfig
from memcalib_jax.training.state import OptimizerConfig, matrices_in
from memcalib_jax.training.step import StepConfig
from memcalib_jax.training.update import ObjectiveConfig

FLAGS = flags.FLAGS

common.define_model_flags()
common.define_lora_flags()
common.define_judge_flags()
flags.adopt_module_key_flags(common)
flags.DEFINE_string("train_file", None, "Records to train on (JSONL); default: 36 sample records.")
flags.DEFINE_string("eval_file", None, "Records to evaluate on during training; default: the "
                    "other 12 sample records where --train_file is not given, else none.")
flags.DEFINE_enum("representation", "atomic", ["atomic", "fluent"],
                  "How training prompts word their memories.")
flags.DEFINE_enum("eval_representation", "fluent", ["atomic", "fluent"],
                  "How evaluation prompts word their memories.")
flags.DEFINE_enum("method", "memcalib", METHODS, "How advantages are assigned to tokens.")
flags.DEFINE_enum("mode", "ordered", ["ordered", "absolute", "positive_only"],
                  "Which tokens a channel's credit may go to.")
flags.DEFINE_enum("granularity", "token", ["token"], "What a channel's credit is moved to.")
flags.DEFINE_float("eta", 0.75, "Share of a channel's advantage that is moved.",
                   lower_bound=0, upper_bound=1)
flags.DEFINE_integer("num_prompts", 64, "Prompts of a step.", lower_bound=1)
flags.DEFINE_integer("group_size", 8, "Responses of a prompt.", lower_bound=2)
flags.DEFINE_integer("mini_batch_size", 256, "Responses of an optimizer step: a multiple of "
                     "--group_size that divides the step's responses.", lower_bound=1)
flags.DEFINE_integer("num_steps", None, "Steps; default: one epoch.", lower_bound=1)
flags.DEFINE_float("temperature", 1.0, "Temperature of the rollouts.", lower_bound=1e-3)
flags.DEFINE_float("top_p", 1.0, "Nucleus of the rollouts.", lower_bound=0, upper_bound=1)
flags.DEFINE_float("learning_rate", 1e-6, "Constant learning rate of AdamW.", lower_bound=0)
flags.DEFINE_float("kl", 0.01, "Weight of the KL penalty to the frozen start.", lower_bound=0)
flags.DEFINE_float("clip", 0.2, "Radius of the ratio's clip.", lower_bound=0)
flags.DEFINE_enum("scoring_dtype", None, ["bfloat16", "float32"],
                  "Inputs of matrix products in the counterfactual pass; default: --dtype.")
flags.DEFINE_integer("bin_tokens", 8192, "Tokens of one packed device call.", lower_bound=256)
flags.DEFINE_float("max_failed_judgments", 0.5, "Share of failed judge calls in a step above "
                   "which the run stops.", lower_bound=0, upper_bound=1)
flags.DEFINE_integer("save_every", 30, "Steps between checkpoints.", lower_bound=1)
flags.DEFINE_integer("eval_every", 30, "Steps between evaluations.", lower_bound=1)
flags.DEFINE_bool("dry_run", False, "Check everything, print the settings, and stop.")

# Flags that may differ when a run is resumed: they change no number of a step.
MAY_CHANGE = ("num_steps", "save_every", "eval_every", "eval_file", "dry_run", "run_dir",
              "judge_url", "judge_timeout", "judge_attempts", "judge_concurrency",
              "judge_requests_per_minute", "judge_cache_dir", "max_failed_judgments")


def step_config() -> StepConfig:
    """Builds the step's settings from the flags.

    Raises:
      UsageError: flags that contradict each other.
    """
    responses = FLAGS.num_prompts * FLAGS.group_size
    if FLAGS.mini_batch_size % FLAGS.group_size or responses % FLAGS.mini_batch_size:
        raise common.UsageError(
            f"--mini_batch_size={FLAGS.mini_batch_size} must be a multiple of "
            f"--group_size={FLAGS.group_size} and divide the step's {responses} responses "
            f"({FLAGS.num_prompts} prompts x {FLAGS.group_size})")
    if FLAGS.top_p <= 0:
        raise common.UsageError("--top_p must be in (0, 1]")
    return StepConfig(
        method=FLAGS.method,
        credit=CreditConfig.create(eta=FLAGS.eta, mode=FLAGS.mode, granularity=FLAGS.granularity),
        sampling=SamplingConfig(FLAGS.group_size, FLAGS.max_response_tokens,
                                temperature=FLAGS.temperature, top_p=FLAGS.top_p),
        objective=ObjectiveConfig(clip=FLAGS.clip, kl_weight=FLAGS.kl,
                                  temperature=FLAGS.temperature, compute_dtype=FLAGS.dtype),
        optimizer=OptimizerConfig(learning_rate=FLAGS.learning_rate),
        mini_batch_size=FLAGS.mini_batch_size, representation=FLAGS.representation,
        scoring_dtype=FLAGS.scoring_dtype or FLAGS.dtype, bin_tokens=FLAGS.bin_tokens,
        max_failed_judgments=FLAGS.max_failed_judgments)


def main():
    # Everything that can be wrong with flags, files and the endpoint is found before the model
    # is loaded.
    settings = step_config()
    run_dir = pathlib.Path(FLAGS.run_dir)
    records = common.read_records(FLAGS.train_file, held_out=False)
    eval_records = []
    if FLAGS.eval_file or not FLAGS.train_file:
        eval_records = common.read_records(FLAGS.eval_file, held_out=True)
    path = common.model_path()
    model_config, tokenizer = load_config(path), load_tokenizer(path)
    lora = common.lora_config(common.flag_values(), model_config)
    prompts = common.fitting_prompts(tokenizer, records, FLAGS.representation, "training")
    eval_prompts = common.fitting_prompts(
        tokenizer, eval_records, FLAGS.eval_representation, "evaluation")
    common.check_lengths(prompts + eval_prompts, model_config)
    if len(prompts) < FLAGS.num_prompts:
        raise common.UsageError(
            f"{len(prompts)} training prompts cannot fill a step of "
            f"--num_prompts={FLAGS.num_prompts}")
    loop = LoopConfig(
        run_dir, FLAGS.num_steps or len(prompts) // FLAGS.num_prompts, FLAGS.num_prompts,
        FLAGS.seed, FLAGS.save_every, FLAGS.eval_every)
    config = common.flag_values() | {
        "model_path": str(path), "prompts_sha256": common.digest(prompts)}
    print(json.dumps(config, indent=2))
    judge, client, background = common.open_judge(run_dir)
    if FLAGS.dry_run:
        print(f"dry run: {len(prompts)} training prompts, {loop.num_steps} steps of "
              f"{FLAGS.num_prompts} x {FLAGS.group_size} responses; all checks passed")
        return
    common.claim_run_dir(run_dir, config, may_change=MAY_CHANGE)

    params, _ = load(path, dtype=jnp.float32)
    if lora:  # a frozen base needs no more than what its products take
        params = matrices_in(params, jnp.promote_types(FLAGS.dtype, settings.scoring_dtype))
    policy = Policy(params, model_config, tokenizer)
    state = train(loop, settings, policy, prompts, eval_prompts, judge, background, lora=lora)
    if lora:
        save_adapter(run_dir / "adapter", state.params, lora, model_config, str(path))
    background.submit(client.aclose()).result()
    background.close()
    print(f"judge: {json.dumps(client.stats())}")
    print(f"done: metrics, rollouts and checkpoints are in {run_dir}")


if __name__ == "__main__":
    common.run(main)
