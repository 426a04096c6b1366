r"""Distils a model from itself: a frozen copy that sees levels and rubrics teaches (OPSD).

    python -m experiments.train_distill --method=opsd_gkd --model_path=/models/cold_start \
        --train_file=train.jsonl --run_dir=runs/opsd_gkd

Responses are the student's own, and no judge is asked. The same command resumes a run that was
stopped. Defaults are the paper's (E.2, arXiv 2609.24259). Where the paper starts from its cold
start: fine-tune with experiments.train_sft, write the run as a model with experiments.convert, and
give that as --model_path.
"""

import hashlib
import json
import pathlib

import jax.numpy as jnp
from absl import flags

from experiments import common, devices
from memcalib_jax.data import render
from memcalib_jax.data.teacher import TEACHER_INSTRUCTIONS, teacher_messages
from memcalib_jax.models import load, load_config, load_tokenizer
from memcalib_jax.models.packed import REMAT
from memcalib_jax.models.weights.peft import save_adapter
from memcalib_jax.parallel import multihost
from memcalib_jax.training.distillation import METHODS, DistillConfig, Lesson, distill
from memcalib_jax.training.preemption import StopSignal
from memcalib_jax.training.rollouts import Policy, Prompt, SamplingConfig
from memcalib_jax.training.runner import RunConfig
from memcalib_jax.training.state import OptimizerConfig, matrices_in
from memcalib_jax.training.update import ObjectiveConfig

FLAGS = flags.FLAGS

common.define_model_flags()
common.define_lora_flags()
devices.define_flags()
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(devices)
flags.DEFINE_string("train_file", None, "Records to train on (JSONL); default: 36 sample records.")
flags.DEFINE_enum("representation", "atomic", ["atomic", "fluent"],
                  "How prompts word their memories.")
flags.DEFINE_enum("method", "opsd_pg", METHODS, "opsd_pg: policy gradient, the advantage of a "
                  "token is log p_teacher - log p_old; opsd_gkd: forward KL over the teacher's 64 "
                  "likeliest tokens and one bucket of all others.")
flags.DEFINE_string("teacher_prompt_file", None, "Text that replaces the teacher's instructions.")
flags.DEFINE_integer("max_teacher_prompt_tokens", 8192, "Records with longer prompts of the "
                     "teacher are skipped, and counted.", lower_bound=1)
flags.DEFINE_integer("num_prompts", 64, "Prompts of a step.", lower_bound=1)
flags.DEFINE_integer("group_size", 8, "Responses of a prompt.", lower_bound=1)
flags.DEFINE_integer("mini_batch_size", 256, "Responses of an optimizer step; divides the step's "
                     "responses.", lower_bound=1)
flags.DEFINE_integer("num_steps", None, "Steps; default: one epoch.", lower_bound=1)
flags.DEFINE_float("temperature", 1.0, "Temperature of the rollouts and of both models' "
                   "log-probs.", lower_bound=1e-3)
flags.DEFINE_float("learning_rate", 1e-6, "Constant learning rate of AdamW.", lower_bound=0)
flags.DEFINE_float("kl", None, "Weight of opsd_pg's KL penalty to the frozen start; default: "
                   "0.01.", lower_bound=0)
flags.DEFINE_float("clip", None, "Radius of opsd_pg's clip of the ratio; default: 0.2.",
                   lower_bound=0)
flags.DEFINE_integer("bin_tokens", 8192, "About the most tokens of one packed device call.",
                     lower_bound=256)
flags.DEFINE_enum("remat", "layers", REMAT, "What the backward pass computes again to save "
                  "memory: nothing, what is no matrix product, or whole layers.")
flags.DEFINE_integer("save_every", 30, "Steps between checkpoints.", lower_bound=1)
flags.DEFINE_bool("dry_run", False, "Check everything, print the settings, and stop.")

# Flags that may differ when a run is resumed: they change no number of a step.
MAY_CHANGE = ("num_steps", "save_every", "dry_run", "run_dir")


def distill_config() -> DistillConfig:
    """Builds the step's settings from the flags.

    Raises:
      UsageError: flags that contradict each other.
    """
    responses = FLAGS.num_prompts * FLAGS.group_size
    if responses % FLAGS.mini_batch_size:
        raise common.UsageError(
            f"--mini_batch_size={FLAGS.mini_batch_size} must divide the step's {responses} "
            f"responses ({FLAGS.num_prompts} prompts x {FLAGS.group_size})")
    for name in ("kl", "clip"):
        if FLAGS[name].value is not None and FLAGS.method != "opsd_pg":
            raise common.UsageError(f"--{name} is of --method=opsd_pg; leave it out")
    return DistillConfig(
        FLAGS.method,
        SamplingConfig(FLAGS.group_size, FLAGS.max_response_tokens, temperature=FLAGS.temperature),
        ObjectiveConfig(clip=0.2 if FLAGS.clip is None else FLAGS.clip,
                        kl_weight=0.01 if FLAGS.kl is None else FLAGS.kl,
                        temperature=FLAGS.temperature, compute_dtype=FLAGS.dtype,
                        remat=FLAGS.remat),
        OptimizerConfig(learning_rate=FLAGS.learning_rate),
        FLAGS.mini_batch_size, FLAGS.bin_tokens)


def read_instructions() -> str:
    """Returns the teacher's instructions, of the flag's file or the default.

    Raises:
      UsageError: the file cannot be read, is no UTF-8 text, or is empty.
    """
    path = FLAGS.teacher_prompt_file
    if path is None:
        return TEACHER_INSTRUCTIONS
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise common.UsageError(f"--teacher_prompt_file={path} must be UTF-8 text") from None
    except OSError as error:
        raise common.UsageError(f"--teacher_prompt_file={path} cannot be read: "
                                f"{error.strerror}") from None
    if not text:
        raise common.UsageError(f"--teacher_prompt_file={path} is empty")
    return text


def make_lessons(tokenizer, prompts: list[Prompt], instructions: str) -> list[Lesson]:
    """Renders what the teacher sees; skips and counts what is over its limit."""
    lessons = [Lesson(prompt, tuple(render(tokenizer, teacher_messages(
        prompt.record, representation=FLAGS.representation, instructions=instructions))))
        for prompt in prompts]
    fitting = [lesson for lesson in lessons
               if len(lesson.teacher_tokens) <= FLAGS.max_teacher_prompt_tokens]
    if len(fitting) < len(lessons):
        longest = max(len(lesson.teacher_tokens) for lesson in lessons)
        print(f"skipped {len(lessons) - len(fitting)} of {len(lessons)} records whose teacher "
              f"prompt is over --max_teacher_prompt_tokens={FLAGS.max_teacher_prompt_tokens} "
              f"(the longest has {longest} tokens)")
    return fitting


def main():
    # Everything that can be wrong with flags and files is found before the model is loaded.
    settings = distill_config()
    instructions = read_instructions()
    records = common.read_records(FLAGS.train_file, held_out=False)
    path = common.model_path()
    config, tokenizer = load_config(path), load_tokenizer(path)
    lora = common.lora_config(common.flag_values(), config)
    prompts = common.fitting_prompts(tokenizer, records, FLAGS.representation, "training")
    lessons = make_lessons(tokenizer, prompts, instructions)
    if len(lessons) < FLAGS.num_prompts:
        raise common.UsageError(f"{len(lessons)} training prompts cannot fill a step of "
                                f"--num_prompts={FLAGS.num_prompts}")
    common.check_lengths(prompts, config)
    common.check_vocabulary([lesson.teacher_tokens for lesson in lessons], config)
    longest = max(len(lesson.teacher_tokens) for lesson in lessons)
    if longest + FLAGS.max_response_tokens > config.max_positions:
        raise common.UsageError(
            f"the teacher's longest prompt has {longest} tokens; with --max_response_tokens="
            f"{FLAGS.max_response_tokens} it exceeds the model's {config.max_positions} positions: "
            "lower --max_teacher_prompt_tokens or --max_response_tokens")
    run_dir = pathlib.Path(FLAGS.run_dir)
    num_steps = FLAGS.num_steps or len(lessons) // FLAGS.num_prompts
    shown = json.dumps([[lesson.prompt.tokens, lesson.teacher_tokens] for lesson in lessons])
    values = common.flag_values() | {
        "model_path": str(path), "prompts_sha256": hashlib.sha256(shown.encode()).hexdigest()}
    print(json.dumps(values, indent=2))
    if FLAGS.dry_run:
        print(f"dry run: {len(lessons)} training prompts, {num_steps} steps of "
              f"{FLAGS.num_prompts} x {FLAGS.group_size} responses; the teacher's longest prompt "
              f"has {longest} tokens; all checks passed")
        return
    common.claim_run_dir(run_dir, values, may_change=MAY_CHANGE)

    params, _ = load(path, dtype=jnp.float32, shardings=devices.parameter_shardings(config))
    if lora:  # a frozen base needs no more than what its products take
        params = matrices_in(params, FLAGS.dtype)
    with StopSignal() as stop:
        state = distill(RunConfig(run_dir, num_steps, FLAGS.save_every, FLAGS.seed, stop), settings,
                        Policy(params, config, tokenizer), lessons, FLAGS.num_prompts, lora=lora)
    if lora and multihost.is_main():
        save_adapter(run_dir / "adapter", state.params, lora, config, str(path))
    print(f"done: metrics, rollouts and checkpoints are in {run_dir}")


if __name__ == "__main__":
    common.run(main)
