r"""Fine-tunes a model on responses to records: the SFT baseline, or the cold start of training.

    python -m experiments.train_sft --run_dir=runs/cold_start --train_file=cold_start.jsonl \
        --responses_file=responses.jsonl --eval_fraction=0.05

The same command resumes a run that was stopped. Defaults are the paper's (E.2, arXiv 2609.24259):
an adapter of rank 32, one epoch in batches of 32. experiments.evaluate takes the run as
--checkpoint; to train on from it, write it as a model with experiments.convert and give that to
train_rl or train_distill.
"""

import hashlib
import json
import pathlib

import jax.numpy as jnp
from absl import flags

from experiments import common, devices
from memcalib_jax.data import stratified_split
from memcalib_jax.data.demonstrations import (
    Demonstration, load_demonstrations, sample_demonstrations)
from memcalib_jax.models import ModelConfig, load, load_config, load_tokenizer
from memcalib_jax.models.packed import REMAT
from memcalib_jax.models.weights.peft import save_adapter
from memcalib_jax.parallel import multihost
from memcalib_jax.training.pairs import Pair
from memcalib_jax.training.preemption import StopSignal
from memcalib_jax.training.runner import RunConfig
from memcalib_jax.training.sft import LikelihoodConfig, SftConfig, fine_tune, to_pair
from memcalib_jax.training.state import OptimizerConfig, matrices_in

FLAGS = flags.FLAGS

common.define_model_flags()
common.define_lora_flags()
devices.define_flags()
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(devices)
FLAGS.set_default("lora_rank", 32)
flags.DEFINE_string("train_file", None, "Records to train on (JSONL); default: 36 sample records.")
flags.DEFINE_string("responses_file", None, "Responses to the records of --train_file and "
                    "--eval_file (JSONL): objects with id and response; records without one are "
                    "left out. Default: the sample's calibrated responses.")
flags.DEFINE_string("eval_file", None, "Records whose loss is taken before, during and after "
                    "training; default: the other 12 sample records where --train_file is not "
                    "given, else none.")
flags.DEFINE_float("eval_fraction", 0.0, "Share of the records of --train_file that is held out "
                   "for that instead, by domain.", lower_bound=0, upper_bound=0.9)
flags.DEFINE_enum("representation", "atomic", ["atomic", "fluent"],
                  "How prompts word their memories.")
flags.DEFINE_integer("batch_size", 32, "Responses of an optimizer step.", lower_bound=1)
flags.DEFINE_integer("num_steps", None, "Steps; default: one epoch.", lower_bound=1)
flags.DEFINE_float("learning_rate", 1e-4, "Highest learning rate of AdamW.", lower_bound=0)
flags.DEFINE_float("warmup", 0.05, "Share of the steps in which the rate rises; in the others it "
                   "falls to 0 by a cosine.", lower_bound=0, upper_bound=0.99)
flags.DEFINE_integer("bin_tokens", 8192, "About the most tokens of one packed device call.",
                     lower_bound=256)
flags.DEFINE_enum("remat", "layers", REMAT, "What the backward pass computes again to save "
                  "memory: nothing, what is no matrix product, or whole layers.")
flags.DEFINE_integer("save_every", 30, "Steps between checkpoints.", lower_bound=1)
flags.DEFINE_integer("eval_every", 30, "Steps between evaluations.", lower_bound=1)
flags.DEFINE_bool("dry_run", False, "Check everything, print the settings, and stop.")

# Flags that may differ when a run is resumed: they change no number of a step. The number of
# steps is none of them, since the learning rate follows it.
MAY_CHANGE = ("save_every", "eval_every", "dry_run", "run_dir")


def read_demonstrations() -> tuple[list[Demonstration], list[Demonstration]]:
    """Reads what to train on and what to hold out, as the flags say.

    Raises:
      UsageError: flags that contradict each other, or no response to train on.
    """
    if bool(FLAGS.train_file) != bool(FLAGS.responses_file):
        raise common.UsageError("--train_file and --responses_file go together: records, and the "
                                "responses to them")
    if FLAGS.eval_file and not FLAGS.train_file:
        raise common.UsageError("--eval_file needs --train_file and a --responses_file that "
                                "answers both")
    if FLAGS.eval_fraction and (FLAGS.eval_file or not FLAGS.train_file):
        raise common.UsageError("--eval_fraction holds out a part of --train_file; give it "
                                "without --eval_file")
    records = common.read_records(FLAGS.train_file, held_out=False)
    held_out = []
    if FLAGS.eval_file or not FLAGS.train_file:
        held_out = common.read_records(FLAGS.eval_file, held_out=True)
    both = {record.id for record in records} & {record.id for record in held_out}
    if both:
        raise common.UsageError(
            f"--eval_file={FLAGS.eval_file} shares {len(both)} records with --train_file: "
            f"{', '.join(sorted(both)[:5])}; hold out others")
    if FLAGS.responses_file:
        found = load_demonstrations(FLAGS.responses_file, records + held_out)
    else:
        found = sample_demonstrations(records + held_out)
    lacking = len(records) + len(held_out) - len(found)
    if lacking:
        print(f"left out {lacking} of {len(records) + len(held_out)} records, to which "
              f"{FLAGS.responses_file} has no response")
    by_id = {demonstration.record.id: demonstration for demonstration in found}
    records, held_out = ([record for record in part if record.id in by_id]
                         for part in (records, held_out))
    if FLAGS.eval_fraction:
        count = round(FLAGS.eval_fraction * len(records))
        records, held_out = stratified_split(records, count, seed=FLAGS.seed)
    return tuple([by_id[record.id] for record in part] for part in (records, held_out))


def fitting_pairs(tokenizer, config: ModelConfig, demonstrations: list[Demonstration],
                  what: str) -> list[Pair]:
    """Returns the pairs within --max_prompt_tokens and --max_response_tokens; counts the others.

    Raises:
      UsageError: the tokenizer cannot render them.
    """
    try:
        pairs = [to_pair(tokenizer, config, demonstration, FLAGS.representation)
                 for demonstration in demonstrations]
    except ValueError as error:
        raise common.UsageError(str(error)) from None
    fitting = [len(pair.prompt) <= FLAGS.max_prompt_tokens
               and len(pair.response) <= FLAGS.max_response_tokens for pair in pairs]
    too_long = [demonstration.record.id
                for demonstration, fits in zip(demonstrations, fitting) if not fits]
    if too_long:
        print(f"skipped {len(too_long)} of {len(pairs)} {what} pairs over --max_prompt_tokens="
              f"{FLAGS.max_prompt_tokens} or --max_response_tokens={FLAGS.max_response_tokens}: "
              f"{', '.join(too_long[:5])}{' ...' if len(too_long) > 5 else ''}")
    return [pair for pair, fits in zip(pairs, fitting) if fits]


def check_pairs(pairs: list[Pair], held_out: list[Pair], config: ModelConfig):
    """Refuses pairs that the model cannot take, or that do not fill a batch.

    Raises:
      UsageError: says which limit is broken.
    """
    if len(pairs) < FLAGS.batch_size:
        raise common.UsageError(f"{len(pairs)} training pairs cannot fill a step of --batch_size="
                                f"{FLAGS.batch_size}")
    if FLAGS.eval_fraction and not held_out:
        raise common.UsageError(f"--eval_fraction={FLAGS.eval_fraction} holds out none of "
                                f"{len(pairs)} pairs")
    common.check_vocabulary([ids for pair in pairs + held_out for ids in pair], config)
    longest = max(len(pair.prompt) + len(pair.response) for pair in pairs + held_out)
    if longest > config.max_positions:
        raise common.UsageError(
            f"the longest prompt with its response has {longest} tokens, but the model "
            f"{config.max_positions} positions: lower --max_prompt_tokens or "
            "--max_response_tokens")


def main():
    # Everything that can be wrong with flags and files is found before the model is loaded.
    demonstrations, held_out = read_demonstrations()
    path = common.model_path()
    config, tokenizer = load_config(path), load_tokenizer(path)
    lora = common.lora_config(common.flag_values(), config)
    pairs = fitting_pairs(tokenizer, config, demonstrations, "training")
    held_out = fitting_pairs(tokenizer, config, held_out, "held-out")
    check_pairs(pairs, held_out, config)
    run_dir = pathlib.Path(FLAGS.run_dir)
    num_steps = FLAGS.num_steps or -(-len(pairs) // FLAGS.batch_size)
    values = common.flag_values() | {
        "model_path": str(path),
        "pairs_sha256": hashlib.sha256(json.dumps([pairs, held_out]).encode()).hexdigest()}
    print(json.dumps(values, indent=2))
    if FLAGS.dry_run:
        print(f"dry run: {len(pairs)} training pairs, {len(held_out)} held out, {num_steps} steps "
              f"of {FLAGS.batch_size}; all checks passed")
        return
    common.claim_run_dir(run_dir, values, may_change=MAY_CHANGE)

    params, _ = load(path, dtype=jnp.float32, shardings=devices.parameter_shardings(config))
    if lora:  # a frozen base needs no more than what its products take
        params = matrices_in(params, FLAGS.dtype)
    settings = SftConfig(
        LikelihoodConfig(FLAGS.dtype, FLAGS.remat),
        OptimizerConfig(FLAGS.learning_rate, warmup_steps=int(FLAGS.warmup * num_steps),
                        total_steps=num_steps),
        FLAGS.batch_size, FLAGS.bin_tokens, FLAGS.eval_every)
    with StopSignal() as stop:
        state = fine_tune(RunConfig(run_dir, num_steps, FLAGS.save_every, FLAGS.seed, stop),
                          settings, params, config, pairs, held_out, lora=lora)
    if lora and multihost.is_main():
        save_adapter(run_dir / "adapter", state.params, lora, config, str(path))
    print(f"done: metrics and checkpoints are in {run_dir}; to train on from it: python -m "
          f"experiments.convert --model_path={path} --checkpoint={run_dir} --output_dir=FOLDER")


if __name__ == "__main__":
    common.run(main)
