r"""Trains a model to build memory over many sessions with LoGo-GRPO (Memory-R2).

    python -m experiments.train_memory --run_dir=runs/memory \
        --flagfile=experiments/presets/memory_quickstart.flags

The same command resumes a run that was stopped. Without --conversations_file it trains on the
built-in conversations. Each stage of the curriculum has a folder of its own in --run_dir, with the
parameters of its best validation in best/.
"""

import hashlib
import json
import pathlib

import jax.numpy as jnp
from absl import flags

from experiments import common, devices, memory_flags
from memcalib_jax.credit.logo import LEVELS
from memcalib_jax.memory.curriculum import PAPER, Stage, parse_stages
from memcalib_jax.memory.episodes import MERGED, ROLES, EpisodeConfig
from memcalib_jax.memory.retrieval import EmbeddingError
from memcalib_jax.memory.rewards import OVERLAPS, UNFINISHED, RewardConfig
from memcalib_jax.models import load, load_config, load_tokenizer
from memcalib_jax.models.packed import REMAT
from memcalib_jax.training.logo import LogoConfig
from memcalib_jax.training.memory_building import BuildingConfig, Surroundings, train_stage
from memcalib_jax.training.preemption import StopSignal
from memcalib_jax.training.runner import RunConfig
from memcalib_jax.training.state import OptimizerConfig, matrices_in

FLAGS = flags.FLAGS

common.define_model_flags()
devices.define_flags()
memory_flags.define_flags()
for module in (common, devices, memory_flags):
    flags.adopt_module_key_flags(module)

flags.DEFINE_string("stages", ",".join(f"{s.sessions}:{s.steps}" for s in PAPER),
                    "Stages of the curriculum, SESSIONS:STEPS each; one alone: no curriculum.")
flags.DEFINE_integer("num_trajectories", 16, "Trajectories of a conversation, G.", lower_bound=2)
flags.DEFINE_float("local_fraction", 0.5, "Probability that a session is rerolled; 0: GRPO.",
                   lower_bound=0, upper_bound=1)
flags.DEFINE_integer("num_rerolls", 4, "Rerolls of such a session.", lower_bound=2)
flags.DEFINE_float("local_temperature", 1.0, "Temperature of rerolls; 0: greedy, as the release "
                   "has it.", lower_bound=0)
flags.DEFINE_bool("session_only", False, "Ask a rerolled bank only about its own session.")
flags.DEFINE_enum("trained_roles", "all", ["all", *ROLES], "Roles that learn.")
flags.DEFINE_enum("overlap", "multiset", OVERLAPS, "How repeated tokens count in F1.")
flags.DEFINE_enum("unfinished", "both", UNFINISHED, "Where a session that was cut off is worth 0.")
flags.DEFINE_float("compression", 0.3, "Weight of the compression penalty, lambda.", lower_bound=0)
flags.DEFINE_float("allowance", 0.7, "Share of the conversation's words that a bank may hold.",
                   lower_bound=0)
flags.DEFINE_integer("terminal_questions", 64, "Most questions to a terminal bank.", lower_bound=1)
flags.DEFINE_integer("local_questions", 16, "Most questions to a rerolled bank.", lower_bound=1)
flags.DEFINE_enum("level", "step", LEVELS, "What weighs the same in the loss.")
flags.DEFINE_float("learning_rate", 2e-6, "Learning rate of AdamW.", lower_bound=0)
flags.DEFINE_float("kl", 0.001, "Weight of the KL penalty to the stage's start.", lower_bound=0)
flags.DEFINE_float("entropy", 0.001, "Weight of the entropy bonus.", lower_bound=0)
flags.DEFINE_integer("num_epochs", 2, "Passes over a step's chats.", lower_bound=1)
flags.DEFINE_integer("num_mini_batches", 4, "Updates of a pass.", lower_bound=1)
flags.DEFINE_integer("bin_tokens", 8192, "About the most tokens of one packed device call.",
                     lower_bound=256)
flags.DEFINE_enum("remat", "layers", REMAT, "What the backward pass computes again.")
flags.DEFINE_integer("eval_sessions", 0, "Validate on so many sessions; 0: all.", lower_bound=0)
flags.DEFINE_integer("eval_every", 5, "Steps between validations.", lower_bound=1)
flags.DEFINE_integer("patience", 3, "Validations without gain that end a stage.", lower_bound=1)
flags.DEFINE_integer("save_every", 5, "Steps between checkpoints.", lower_bound=1)
flags.DEFINE_bool("dry_run", False, "Check everything, print the settings, and stop.")

MAY_CHANGE = ("save_every", "dry_run", "run_dir")


def settings_of_flags() -> tuple[BuildingConfig, tuple[Stage, ...]]:
    """Returns what a step does, and the stages.

    Raises:
      UsageError: a value is out of range, or two contradict each other.
    """
    roles = MERGED if FLAGS.merged_role else ROLES
    if FLAGS.merged_role and FLAGS.trained_roles != "all":
        raise common.UsageError("--trained_roles names roles that --merged_role does without")
    try:
        stages = parse_stages(FLAGS.stages)
        return BuildingConfig(
            EpisodeConfig(FLAGS.num_chunks, roles, FLAGS.num_trajectories, FLAGS.local_fraction,
                          FLAGS.num_rerolls),
            RewardConfig(FLAGS.overlap, FLAGS.allowance, FLAGS.compression, FLAGS.unfinished,
                         FLAGS.terminal_questions, FLAGS.local_questions),
            LogoConfig(kl_weight=FLAGS.kl, entropy_weight=FLAGS.entropy, level=FLAGS.level,
                       compute_dtype=FLAGS.dtype, remat=FLAGS.remat),
            OptimizerConfig(FLAGS.learning_rate), FLAGS.num_epochs, FLAGS.num_mini_batches,
            FLAGS.max_prompt_tokens, FLAGS.max_response_tokens, FLAGS.local_temperature,
            FLAGS.session_only, None if FLAGS.trained_roles == "all" else (FLAGS.trained_roles,),
            FLAGS.bin_tokens, FLAGS.eval_every, FLAGS.patience), stages
    except ValueError as error:
        raise common.UsageError(f"--stages: {error}" if "stage" in str(error) else str(error)
                                ) from None


def main():
    settings, stages = settings_of_flags()
    parts = memory_flags.read_conversations()
    validation = [conversation.first_sessions(FLAGS.eval_sessions) if FLAGS.eval_sessions
                  else conversation for conversation in parts["validation"]]
    prompts, retriever = memory_flags.load_prompts(), memory_flags.open_retriever()
    path = common.model_path()
    config, tokenizer = load_config(path), load_tokenizer(path)
    memory_flags.check_flags(config, tokenizer, prompts)
    values = common.flag_values() | {
        "model_path": str(path), "conversations_sha256": hashlib.sha256(
            repr([parts["train"], validation, prompts]).encode()).hexdigest()}
    print(json.dumps(values, indent=2))
    if FLAGS.dry_run:
        print(f"dry run: {len(parts['train'])} conversations to train on, {len(validation)} to "
              f"validate on, {sum(stage.steps for stage in stages)} steps in {len(stages)} "
              "stages; all checks passed")
        return
    run_dir = pathlib.Path(FLAGS.run_dir)
    common.claim_run_dir(run_dir, values, may_change=MAY_CHANGE)

    params, _ = load(path, dtype=jnp.float32, shardings=devices.parameter_shardings(config))
    answerer = memory_flags.open_answerer(
        matrices_in(params, FLAGS.dtype), config, tokenizer, run_dir)
    around = Surroundings(config, tokenizer, answerer, retriever, prompts)
    with StopSignal() as stop:
        for number, stage in enumerate(stages, start=1):
            print(f"stage {number}/{len(stages)}: {stage.sessions} sessions")
            run = RunConfig(run_dir / f"stage_{stage.sessions:02d}", stage.steps, FLAGS.save_every,
                            FLAGS.seed, stop)
            try:
                params = train_stage(run, stage, params, around, parts["train"], validation,
                                     settings)
            except EmbeddingError as error:
                raise common.UsageError(str(error)) from None
    print(f"done: the best parameters of each stage are in {run_dir}/stage_*/best")


if __name__ == "__main__":
    common.run(main)
