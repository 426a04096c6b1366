r"""Trains a model to use memory at the right level: MemCalib-RL, GDPO or GRPO.

    python -m experiments.train_rl --run_dir=runs/first --judge_url=http://127.0.0.1:8000/v1 \
        --judge_model=my-judge --train_file=train.jsonl

The same command resumes a run that was stopped. Defaults are the paper's (E.2, arXiv 2609.24259).
"""

import json
import pathlib

import jax
import jax.numpy as jnp
from absl import flags

from experiments import common, devices, judging
from memcalib_jax.credit import CreditConfig
from memcalib_jax.credit.assign import GRANULARITIES
from memcalib_jax.credit.localization import MODES
from memcalib_jax.models import ModelConfig, load, load_config, load_tokenizer
from memcalib_jax.models.lora import LoraConfig
from memcalib_jax.models.packed import REMAT
from memcalib_jax.models.weights.peft import save_adapter
from memcalib_jax.parallel import multihost
from memcalib_jax.training.advantages import METHODS, ScoringConfig
from memcalib_jax.training.loop import LoopConfig, train
from memcalib_jax.training.memory import device_memory, memory_table, step_memory
from memcalib_jax.training.preemption import StopSignal
from memcalib_jax.training.rollouts import Policy, Prompt, SamplingConfig
from memcalib_jax.training.runner import RunConfig
from memcalib_jax.training.state import OptimizerConfig, matrices_in
from memcalib_jax.training.step import StepConfig
from memcalib_jax.training.update import ObjectiveConfig

FLAGS = flags.FLAGS

common.define_model_flags()
common.define_lora_flags()
judging.define_flags()
devices.define_flags()
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(judging)
flags.adopt_module_key_flags(devices)
flags.DEFINE_string("train_file", None, "Records to train on (JSONL); default: 36 sample records.")
flags.DEFINE_string("eval_file", None, "Records to evaluate on during training; default: the "
                    "other 12 sample records where --train_file is not given, else none.")
flags.DEFINE_enum("representation", "atomic", ["atomic", "fluent"],
                  "How training prompts word their memories.")
flags.DEFINE_enum("eval_representation", "fluent", ["atomic", "fluent"],
                  "How evaluation prompts word their memories.")
flags.DEFINE_enum("method", "memcalib", METHODS, "How advantages are assigned to tokens.")
flags.DEFINE_enum("mode", "ordered", MODES,
                  "Which tokens a channel's credit may go to.")
flags.DEFINE_enum("granularity", "token", GRANULARITIES, "What a channel's credit is moved to.")
flags.DEFINE_bool("merge_overuse", False, "Ignore atoms used as Bound and as Control share one "
                  "channel.")
flags.DEFINE_list("eta", ["0.75"], "Share of a channel's advantage that is moved, in [0, 1]: one "
                  "number, or nine in the order A+,AB-,AC-,BA-,B+,BC-,CA-,CB-,C+.")
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
flags.DEFINE_float("closed_gate_fraction", 1.0, "Share of the counterfactuals scored whose "
                   "direction gate is shut already: they move thresholds, but no advantage. Below "
                   "1 is cheaper and not the paper's method.", lower_bound=0, upper_bound=1)
flags.DEFINE_bool("verify_sharing", False, "Score the first step's counterfactuals as dense rows "
                  "too, and stop if they differ by more than rounding.")
flags.DEFINE_integer("bin_tokens", 8192, "About the most tokens of one packed device call.",
                     lower_bound=256)
flags.DEFINE_enum("remat", "layers", REMAT, "What the backward pass computes again to save "
                  "memory: nothing, what is no matrix product, or whole layers.")
flags.DEFINE_float("max_failed_judgments", 0.5, "Share of failed judge calls in a step above "
                   "which the run stops.", lower_bound=0, upper_bound=1)
flags.DEFINE_integer("save_every", 30, "Steps between checkpoints.", lower_bound=1)
flags.DEFINE_integer("eval_every", 30, "Steps between evaluations.", lower_bound=1)
flags.DEFINE_bool("trace", True, "Keep each step's trace, from which experiments.explain, "
                  "dynamics and localization_study work.")
flags.DEFINE_bool("dry_run", False, "Check everything, print the settings, and stop.")

# Flags that may differ when a run is resumed: they change no number of a step.
MAY_CHANGE = ("num_steps", "save_every", "eval_every", "eval_file", "dry_run", "run_dir",
              "verify_sharing", "trace",
              "judge_url", "judge_timeout", "judge_attempts", "judge_concurrency",
              "judge_requests_per_minute", "judge_cache_dir", "max_failed_judgments")


def credit_config() -> CreditConfig:
    """Builds the constants of the credit assignment from the flags.

    Raises:
      UsageError: --eta is not one or nine numbers in range.
    """
    try:
        eta = [float(value) for value in FLAGS.eta]
        return CreditConfig.create(
            eta=eta[0] if len(eta) == 1 else eta, mode=FLAGS.mode, granularity=FLAGS.granularity,
            merge_overuse=FLAGS.merge_overuse)
    except ValueError as error:
        raise common.UsageError(f"--eta={','.join(FLAGS.eta)}: {error}") from None


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
        credit=credit_config(),
        sampling=SamplingConfig(FLAGS.group_size, FLAGS.max_response_tokens,
                                temperature=FLAGS.temperature, top_p=FLAGS.top_p),
        objective=ObjectiveConfig(clip=FLAGS.clip, kl_weight=FLAGS.kl,
                                  temperature=FLAGS.temperature, compute_dtype=FLAGS.dtype,
                                  remat=FLAGS.remat),
        optimizer=OptimizerConfig(learning_rate=FLAGS.learning_rate),
        mini_batch_size=FLAGS.mini_batch_size,
        scoring=ScoringConfig(FLAGS.scoring_dtype or FLAGS.dtype, FLAGS.representation,
                              FLAGS.closed_gate_fraction),
        bin_tokens=FLAGS.bin_tokens,
        max_failed_judgments=FLAGS.max_failed_judgments,
        trace=FLAGS.trace)


def print_memory(config: ModelConfig, lora: LoraConfig | None, settings: StepConfig,
                 prompts: list[Prompt]):
    """Prints what a step keeps on a device, and warns where that is more than it has."""
    kept = step_memory(
        config, devices.parameter_shardings(config), FLAGS.dtype, lora=lora,
        lora_layout=devices.parameter_shardings(config, lora), sampling=settings.sampling,
        num_prompts=FLAGS.num_prompts, bin_tokens=FLAGS.bin_tokens,
        prompt_tokens=max(len(prompt.tokens) for prompt in prompts),
        num_devices=jax.device_count())
    available = device_memory()
    print(memory_table(kept, available))
    if available and sum(kept.values()) > available:
        print("that is more than a device has: use more devices, split over --mesh_tensor, or "
              "train an adapter (--lora_rank)")


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
    num_steps = FLAGS.num_steps or len(prompts) // FLAGS.num_prompts
    config = common.flag_values() | {
        "model_path": str(path), "prompts_sha256": common.digest(prompts)}
    print(json.dumps(config, indent=2))
    judge, client, background = judging.open_judge(run_dir)
    if FLAGS.dry_run:
        common.check_run_dir(run_dir)
        print_memory(model_config, lora, settings, prompts)
        print(f"dry run: {len(prompts)} training prompts, {num_steps} steps of "
              f"{FLAGS.num_prompts} x {FLAGS.group_size} responses; all checks passed")
        return
    common.claim_run_dir(run_dir, config, may_change=MAY_CHANGE)

    params, _ = load(path, dtype=jnp.float32,
                     shardings=devices.parameter_shardings(model_config))
    if lora:  # a frozen base needs no more than what its products take
        params = matrices_in(params, jnp.promote_types(FLAGS.dtype, settings.scoring.dtype))
    policy = Policy(params, model_config, tokenizer)
    with StopSignal() as stop:
        run = RunConfig(run_dir, num_steps, FLAGS.save_every, FLAGS.seed, stop)
        state = train(LoopConfig(run, FLAGS.num_prompts, FLAGS.eval_every, FLAGS.verify_sharing),
                      settings, policy, prompts, eval_prompts, judge, background, lora=lora)
    if lora and multihost.is_main():
        save_adapter(run_dir / "adapter", state.params, lora, model_config, str(path))
    background.submit(client.aclose()).result()
    background.close()
    print(f"judge: {json.dumps(client.stats())}")
    print(f"done: metrics, rollouts and checkpoints are in {run_dir}")


if __name__ == "__main__":
    common.run(main)
