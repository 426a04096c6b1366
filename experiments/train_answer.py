r"""Trains the answer agent on questions with the memories found for them (Memory-R2, A.1).

    python -m experiments.train_answer --run_dir=runs/answer --gold_banks --encoder=words \
        --top_k=5 --num_prompts=4 --group_size=4 --num_steps=2 --max_prompt_tokens=4096 \
        --max_response_tokens=32

The questions come from memories that a chat endpoint builds, and answers, at temperature 0
(--pipeline_url, --pipeline_model): those answered with an F1 of --least_f1 are kept, and a tenth of
them is held out. With --gold_banks they come from the built-in conversations' own memories instead,
and with --traces_file from an earlier run's traces.jsonl. The same command resumes a run.
"""

import dataclasses
import hashlib
import json
import pathlib

import jax.numpy as jnp
from absl import flags

from experiments import common, devices, memory_flags
from memcalib_jax.api import BackgroundLoop
from memcalib_jax.files import write_atomically
from memcalib_jax.jsonlines import read_rows
from memcalib_jax.memory.agents import EndpointAgent
from memcalib_jax.memory.episodes import MERGED, ROLES, EpisodeConfig, run_trajectories
from memcalib_jax.memory.evaluation import score_answers
from memcalib_jax.memory.rewards import OVERLAPS
from memcalib_jax.memory.roles import SCHEMAS
from memcalib_jax.memory.sample import gold_bank
from memcalib_jax.memory.traces import (
    Trace, keep_traces, make_traces, split_traces, trace_from_json)
from memcalib_jax.models import load, load_config, load_tokenizer
from memcalib_jax.models.packed import REMAT
from memcalib_jax.training.answer_training import AnsweringConfig, train_answering
from memcalib_jax.training.logo import LogoConfig
from memcalib_jax.training.preemption import StopSignal
from memcalib_jax.training.runner import RunConfig
from memcalib_jax.training.state import OptimizerConfig

FLAGS = flags.FLAGS

common.define_model_flags()
devices.define_flags()
memory_flags.define_flags()
memory_flags.define_pipeline_flags()
for module in (common, devices, memory_flags):
    flags.adopt_module_key_flags(module)
FLAGS.set_default("max_prompt_tokens", 12_288)
FLAGS.set_default("max_response_tokens", 1024)

flags.DEFINE_string("traces_file", None, "Questions with their memories (JSONL) that an earlier "
                    "run made.")
flags.DEFINE_bool("gold_banks", False, "Take the built-in conversations' own memories.")
flags.DEFINE_float("least_f1", 0.25, "Least F1 of a question that is kept, where an agent has "
                   "answered.", lower_bound=0, upper_bound=1)
flags.DEFINE_float("held_out", 0.1, "Share of the questions that is held out.", lower_bound=0.01,
                   upper_bound=0.9)
flags.DEFINE_enum("overlap", "multiset", OVERLAPS, "How repeated tokens count in F1.")
flags.DEFINE_integer("num_prompts", 64, "Questions of a step.", lower_bound=1)
flags.DEFINE_integer("group_size", 8, "Answers to each.", lower_bound=2)
flags.DEFINE_integer("num_mini_batches", 4, "Updates of a step.", lower_bound=1)
flags.DEFINE_integer("num_epochs", 5, "Passes over the questions.", lower_bound=1)
flags.DEFINE_integer("num_steps", None, "Steps; default: those of --num_epochs.", lower_bound=1)
flags.DEFINE_float("learning_rate", 2e-6, "Learning rate of AdamW.", lower_bound=0)
flags.DEFINE_float("kl", 0.001, "Weight of the KL penalty to the start.", lower_bound=0)
flags.DEFINE_integer("bin_tokens", 8192, "About the most tokens of one packed device call.",
                     lower_bound=256)
flags.DEFINE_enum("remat", "layers", REMAT, "What the backward pass computes again.")
flags.DEFINE_integer("save_every", 5, "Steps between checkpoints.", lower_bound=1)
flags.DEFINE_integer("eval_every", 5, "Steps between evaluations.", lower_bound=1)
flags.DEFINE_bool("dry_run", False, "Check everything, print the settings, and stop.")

MAY_CHANGE = ("save_every", "dry_run", "run_dir", "pipeline_url")


def check_source():
    """Refuses anything but one source of questions.

    Raises:
      UsageError: none, or several.
    """
    if sum(map(bool, (FLAGS.traces_file, FLAGS.gold_banks, FLAGS.pipeline_url))) != 1:
        raise common.UsageError("give one source of questions: --pipeline_url with "
                                "--pipeline_model, --gold_banks or --traces_file")
    if FLAGS.gold_banks and FLAGS.conversations_file:
        raise common.UsageError("--gold_banks are of the built-in conversations: leave out "
                                "--conversations_file")


def read_traces(path: str) -> list[Trace]:
    """Reads a file of traces.

    Raises:
      UsageError: there is none, or a line is no trace; names it.
      DamagedFile: a line is no JSON object.
    """
    if not pathlib.Path(path).is_file():
        raise common.UsageError(f"--traces_file={path} does not exist")
    traces = []
    for line, row in enumerate(read_rows(pathlib.Path(path)), start=1):
        try:
            traces.append(trace_from_json(row))
        except ValueError as error:
            raise common.UsageError(f"--traces_file={path}, line {line}: {error}") from None
    return traces


def build_traces(prompts: dict[str, str], run_dir: pathlib.Path) -> list[Trace]:
    """Makes the traces of the training conversations, by their gold banks or by the endpoint.

    Raises:
      UsageError: bad settings or a missing key.
      ChatError: the endpoint is out of reach.
    """
    conversations = memory_flags.read_conversations()["train"]
    retriever = memory_flags.open_retriever()
    if FLAGS.gold_banks:
        return make_traces(conversations, [gold_bank(c) for c in conversations], retriever)
    client = memory_flags.open_client("pipeline", run_dir, max_tokens=max(
        FLAGS.answer_max_tokens, FLAGS.max_response_tokens))
    with BackgroundLoop("pipeline") as loop:
        loop.submit(client.probe()).result()
        agent = EndpointAgent(client, loop, SCHEMAS)
        roles = MERGED if FLAGS.merged_role else ROLES
        episodes = run_trajectories(
            conversations, dict.fromkeys(roles, agent), retriever, prompts,
            EpisodeConfig(FLAGS.num_chunks, roles, num_trajectories=1))
        banks = [trajectory.bank for trajectory, in episodes]
        rows = score_answers(conversations, banks, agent, retriever, prompts,
                             overlap=FLAGS.overlap)
        loop.submit(client.aclose()).result()
    traces = make_traces(conversations, banks, retriever, rows)
    kept = keep_traces(traces, FLAGS.least_f1)
    failed = sum(row.failed for row in rows)
    print(f"kept {len(kept)} of {len(traces)} questions, those answered with an F1 of at least "
          f"{FLAGS.least_f1}" + (f"; {failed} calls for answers failed" if failed else ""))
    return kept


def main():
    check_source()
    run_dir, prompts = pathlib.Path(FLAGS.run_dir), memory_flags.load_prompts()
    path = common.model_path()
    config, tokenizer = load_config(path), load_tokenizer(path)
    memory_flags.check_flags(config, tokenizer, prompts)
    values = common.flag_values() | {
        "model_path": str(path), "prompts_sha256": hashlib.sha256(
            json.dumps(prompts).encode()).hexdigest()}
    print(json.dumps(values, indent=2))
    if FLAGS.dry_run:
        print("dry run: all checks passed")
        return
    common.claim_run_dir(run_dir, values, may_change=MAY_CHANGE)
    # Kept, so that a resume learns from the same questions.
    kept = run_dir / "traces.jsonl"
    traces = read_traces(FLAGS.traces_file or kept) if FLAGS.traces_file or kept.is_file() else (
        build_traces(prompts, run_dir))
    if not kept.is_file():
        write_atomically(kept, "".join(json.dumps(dataclasses.asdict(trace)) + "\n"
                                       for trace in traces).encode())
    try:
        train, held_out = split_traces(traces, FLAGS.seed, held_out=FLAGS.held_out)
    except ValueError as error:
        raise common.UsageError(str(error)) from None
    if len(train) < FLAGS.num_prompts:
        raise common.UsageError(f"{len(train)} questions to train on cannot fill a step of "
                                f"--num_prompts={FLAGS.num_prompts}")
    steps = FLAGS.num_steps or -(-FLAGS.num_epochs * len(train) // FLAGS.num_prompts)
    print(f"{len(train)} questions to train on, {len(held_out)} held out, {steps} steps")

    params, _ = load(path, dtype=jnp.float32, shardings=devices.parameter_shardings(config))
    settings = AnsweringConfig(
        LogoConfig(kl_weight=FLAGS.kl, entropy_weight=0.0, level="token",
                   compute_dtype=FLAGS.dtype, remat=FLAGS.remat),
        OptimizerConfig(FLAGS.learning_rate), FLAGS.num_prompts, FLAGS.group_size,
        FLAGS.num_mini_batches, FLAGS.max_prompt_tokens, FLAGS.max_response_tokens, FLAGS.overlap,
        FLAGS.bin_tokens, FLAGS.eval_every)
    with StopSignal() as stop:
        train_answering(RunConfig(run_dir, steps, FLAGS.save_every, FLAGS.seed, stop), params,
                        config, tokenizer, train, held_out, prompts, settings)
    print(f"done: metrics, rollouts and checkpoints are in {run_dir}; experiments.convert makes a "
          "model of them")


if __name__ == "__main__":
    common.run(main)
