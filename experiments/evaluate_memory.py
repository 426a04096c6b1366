r"""Evaluates how well memories serve their questions: F1, BLEU-1, a judge's verdicts and M-Fail.

    python -m experiments.evaluate_memory --run_dir=runs/memory_test --encoder=words \
        --checkpoint=runs/memory/stage_08/best --max_sessions=2 --num_chunks=1 \
        --max_prompt_tokens=3072 --max_response_tokens=48 --answer_max_tokens=24

A model reads the conversations of --part session by session and builds their memories; then the
answer agent is asked everything. --method=raw_turns retrieves from the turns as they were said, and
full_context reads them all; without --checkpoint the pipeline is the untrained one. The same
command goes on with the seeds that are missing. experiments.memory_tables compares finished runs.
"""

import collections
import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from absl import flags

from experiments import common, devices, memory_flags
from memcalib_jax.api import BackgroundLoop, ChatClient, ChatError
from memcalib_jax.evaluation.memory_report import FORMAT, over_seeds, results_table
from memcalib_jax.files import write_atomically, write_json
from memcalib_jax.memory.agents import Agent, EndpointAgent, LocalAgent
from memcalib_jax.memory.bank import Bank
from memcalib_jax.memory.conversations import Conversation
from memcalib_jax.memory.episodes import (
    MERGED, ROLES, EpisodeConfig, Trajectory, run_trajectories)
from memcalib_jax.memory.evaluation import (
    Everything, Scored, bank_growth, completion_tokens, raw_bank, score_answers, summarize)
from memcalib_jax.memory.judge import judge_answers
from memcalib_jax.memory.retrieval import EmbeddingError
from memcalib_jax.memory.rewards import OVERLAPS
from memcalib_jax.memory.roles import SCHEMAS
from memcalib_jax.models import load, load_config, load_tokenizer
from memcalib_jax.training.state import matrices_in

FLAGS = flags.FLAGS

common.define_model_flags()
devices.define_flags()
memory_flags.define_flags()
memory_flags.define_pipeline_flags()
for module in (common, devices, memory_flags):
    flags.adopt_module_key_flags(module)

METHODS = ("pipeline", "raw_turns", "full_context")

flags.DEFINE_string("checkpoint", None, "Folder with the checkpoint of a trained pipeline, such as "
                    "RUN_DIR/stage_08/best of experiments.train_memory.")
flags.DEFINE_enum("method", "pipeline", METHODS, "Where the memories come from.")
flags.DEFINE_enum("part", "test", memory_flags.PARTS, "Conversations to evaluate on.")
flags.DEFINE_integer("max_sessions", 0, "Evaluate on so many sessions of each; 0: all.",
                     lower_bound=0)
flags.DEFINE_string("judge_url", None, "OpenAI-compatible base URL, ending in /v1, of a judge of "
                    "the answers; the key comes from MEMCALIB_JUDGE_API_KEY. Default: no judge.")
flags.DEFINE_string("judge_model", None, "Model that judges.")
flags.DEFINE_enum("overlap", "multiset", OVERLAPS, "How repeated tokens count in F1.")
flags.DEFINE_integer("num_seeds", 1, "Memories of each conversation.", lower_bound=1)
flags.DEFINE_float("temperature", 0.0, "Temperature of extractor and manager; 0: greedy.",
                   lower_bound=0)
flags.DEFINE_bool("one_at_a_time", False, "Read one conversation after the other, so that the "
                  "seconds are those of one alone.")
flags.DEFINE_bool("dry_run", False, "Check everything, print the settings, and stop.")

MAY_CHANGE = ("num_seeds", "dry_run", "run_dir", "answer_url", "judge_url", "pipeline_url",
              "embedding_url")


@dataclasses.dataclass(frozen=True)
class Built:
    """The memories of one seed; a baseline has no trajectories and takes no time."""

    banks: list[Bank]
    trajectories: list[Trajectory]
    seconds: float | None


def check_flags():
    """Refuses flags that contradict each other.

    Raises:
      UsageError: says which.
    """
    if FLAGS.pipeline_url and FLAGS.checkpoint:
        raise common.UsageError("--checkpoint and --pipeline_url exclude each other")
    if FLAGS.method != "pipeline" and (FLAGS.checkpoint or FLAGS.pipeline_url):
        raise common.UsageError(f"--method={FLAGS.method} builds no memory: leave out --checkpoint "
                                "and --pipeline_url")
    if FLAGS.num_seeds > 1 and FLAGS.method != "pipeline":
        raise common.UsageError(f"--method={FLAGS.method} is the same for every seed: leave out "
                                "--num_seeds")
    if FLAGS.num_seeds > 1 and FLAGS.temperature == 0:
        raise common.UsageError("--num_seeds over 1 needs a --temperature over 0: greedy memories "
                                "are all the same")


def build(conversations: Sequence[Conversation], agent: Agent, retriever,
          prompts: dict[str, str]) -> Built:
    """Builds the memories of one seed, by the pipeline."""
    roles = MERGED if FLAGS.merged_role else ROLES
    config = EpisodeConfig(FLAGS.num_chunks, roles, num_trajectories=1)
    parts = [[c] for c in conversations] if FLAGS.one_at_a_time else [conversations]
    started = time.monotonic()
    trajectories = [trajectory for part in parts for trajectory, in run_trajectories(
        part, dict.fromkeys(roles, agent), retriever, prompts, config)]
    seconds = (time.monotonic() - started) / len(conversations)
    return Built([trajectory.bank for trajectory in trajectories], trajectories, seconds)


def judged(rows: list[Scored], client: ChatClient, loop: BackgroundLoop,
           instructions: str) -> list[Scored]:
    """Adds the judge's verdicts to the answers that there are."""
    given = [row for row in rows if not row.failed]
    verdicts = iter(judge_answers([(row.question, row.answer) for row in given], client, loop,
                                  instructions))
    return [row if row.failed else dataclasses.replace(row, right=next(verdicts)) for row in rows]


def results_of_seed(built: Built, rows: list[Scored]) -> dict:
    """Returns what the results say of one seed."""
    counts = sum((run.counts for trajectory in built.trajectories for run in trajectory.runs),
                 collections.Counter())
    return {"summary": summarize(rows), "growth": bank_growth(built.trajectories),
            "tokens": completion_tokens(built.trajectories), "seconds": built.seconds,
            "untagged": sum(not row.failed and not row.tagged for row in rows),
            "counts": dict(sorted(counts.items()))}


def main():
    check_flags()
    run_dir = pathlib.Path(FLAGS.run_dir)
    conversations = memory_flags.read_conversations(FLAGS.part)[FLAGS.part]
    if FLAGS.max_sessions:
        conversations = [c.first_sessions(FLAGS.max_sessions) for c in conversations]
    if not any(question.scored for c in conversations for question in c.questions):
        raise common.UsageError(f"--part={FLAGS.part} has no question to ask")
    prompts, retriever = memory_flags.load_prompts(), memory_flags.open_retriever()
    path = common.model_path()
    config, tokenizer = load_config(path), load_tokenizer(path)
    memory_flags.check_flags(config, tokenizer, prompts)
    trained = common.open_checkpoint(FLAGS.checkpoint, config) if FLAGS.checkpoint else None
    values = common.flag_values() | {
        "model_path": str(path), "checkpoint_step": trained and trained.step,
        "content_sha256": hashlib.sha256(repr([conversations, prompts]).encode()).hexdigest()}
    print(json.dumps(values, indent=2))
    if FLAGS.dry_run:
        asked = sum(question.scored for c in conversations for question in c.questions)
        print(f"dry run: {len(conversations)} conversations, {asked} questions, "
              f"{FLAGS.num_seeds} seeds; all checks passed")
        return
    common.claim_run_dir(run_dir, values, may_change=MAY_CHANGE)

    start = matrices_in(load(path, dtype=jnp.float32,
                             shardings=devices.parameter_shardings(config))[0], FLAGS.dtype)
    policy = matrices_in(trained.params(path), FLAGS.dtype) if trained else start
    answerer = memory_flags.open_answerer(start, config, tokenizer, run_dir)
    loop = BackgroundLoop("endpoints")
    judge = memory_flags.open_client("judge", run_dir) if FLAGS.judge_url else None
    if judge:
        loop.submit(judge.probe()).result()
    seeds = []
    for seed in range(FLAGS.num_seeds):
        kept = run_dir / f"seed_{seed}" / "results.json"
        if kept.is_file():
            seeds.append(json.loads(kept.read_text(encoding="utf-8")))
            continue
        if FLAGS.pipeline_url:  # a seed's replies are its own
            client = memory_flags.open_client(
                "pipeline", kept.parent, max_tokens=FLAGS.max_response_tokens,
                temperature=FLAGS.temperature)
            loop.submit(client.probe()).result()
            agent = EndpointAgent(client, loop, SCHEMAS)
        else:
            agent = LocalAgent(
                policy, config, tokenizer, temperature=FLAGS.temperature,
                key=jax.random.fold_in(jax.random.key(FLAGS.seed), seed),
                max_tokens=FLAGS.max_response_tokens, max_prompt_tokens=FLAGS.max_prompt_tokens)
        try:
            built = (build(conversations, agent, retriever, prompts) if FLAGS.method == "pipeline"
                     else Built([raw_bank(c) for c in conversations], [], None))
            finder = Everything() if FLAGS.method == "full_context" else retriever
            rows = score_answers(conversations, built.banks, answerer, finder, prompts,
                                 overlap=FLAGS.overlap)
        except EmbeddingError as error:
            raise common.UsageError(str(error)) from None
        if all(row.failed for row in rows):
            raise ChatError("empty", f"none of {len(rows)} questions has an answer: check the "
                            "answer agent, and that what it reads fits its context")
        if judge:
            rows = judged(rows, judge, loop, prompts["judge"])
        write_json(kept.with_name("banks.json"), {
            c.id: bank.to_json() for c, bank in zip(conversations, built.banks)})
        write_atomically(kept.with_name("answers.jsonl"), "".join(
            json.dumps(row.to_json()) + "\n" for row in rows).encode())
        write_json(kept, results_of_seed(built, rows))
        seeds.append(json.loads(kept.read_text(encoding="utf-8")))
        print(f"seed {seed}: F1 {seeds[-1]['summary']['all']['f1']:.2f}", flush=True)

    questions = [(c.id, question.text, question.answer) for c in conversations
                 for question in c.questions if question.scored]
    # A count that a seed lacks is 0; any other value that it lacks is unknown.
    counts = [seed.pop("counts") for seed in seeds]
    results = {"format": FORMAT, "method": FLAGS.method, "seeds": len(seeds),
               **over_seeds(seeds),
               "counts": dict(sum(map(collections.Counter, counts), collections.Counter())),
               "questions_sha256": hashlib.sha256(json.dumps(questions).encode()).hexdigest(),
               "settings": values}
    write_json(run_dir / "results.json", results)
    table = results_table(results)
    write_atomically(run_dir / "results.md", (table + "\n").encode())
    print(f"\n{table}\n\nresults, answers and banks are in {run_dir}")


if __name__ == "__main__":
    common.run(main)
