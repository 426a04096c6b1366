r"""Evaluates how a model uses memory: answers each record under several seeds, judges, sums up.

    python -m experiments.evaluate --run_dir=runs/base --judge_url=http://127.0.0.1:8000/v1 \
        --judge_model=my-judge --eval_file=test.jsonl

The same command resumes an evaluation that was stopped; judgments that failed are asked again.
With --checkpoint=RUN_DIR the parameters are those of a training run's newest checkpoint.
"""

import collections
import concurrent.futures
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import common
from memcalib_jax.evaluation import report
from memcalib_jax.evaluation.metrics import calibration_metrics
from memcalib_jax.evaluation.summary import summarize
from memcalib_jax.judge import Judgment
from memcalib_jax.models import load, load_config, load_tokenizer
from memcalib_jax.training.advantages import judged_levels
from memcalib_jax.training.answering import Answers
from memcalib_jax.training.logging import duration, write_atomically, write_json
from memcalib_jax.training.rollouts import Policy, Prompt, SamplingConfig
from memcalib_jax.training.state import matrices_in
from memcalib_jax.training.step import NoValidResponse

FLAGS = flags.FLAGS

common.define_model_flags()
common.define_judge_flags()
flags.adopt_module_key_flags(common)
flags.DEFINE_string("eval_file", None, "Records to evaluate on (JSONL); default: 12 sample records "
                    "that training without --train_file leaves out.")
flags.DEFINE_string("checkpoint", None, "Folder of a training run, whose newest checkpoint gives "
                    "the parameters; --model_path gives their shape and the tokenizer.")
flags.DEFINE_enum("representation", "fluent", ["atomic", "fluent"],
                  "How prompts word their memories.")
flags.DEFINE_integer("num_seeds", 3, "Responses to each record.", lower_bound=1)
flags.DEFINE_float("temperature", 1.0, "Temperature of the responses; 0: the most likely token.",
                   lower_bound=0)
flags.DEFINE_float("top_p", 1.0, "Nucleus of the responses.", lower_bound=0, upper_bound=1)
flags.DEFINE_bool("dry_run", False, "Check everything, print the settings, and stop.")

# Flags that may differ when an evaluation is resumed: they change no response or judgment.
MAY_CHANGE = ("num_seeds", "dry_run", "run_dir", "judge_url", "judge_timeout", "judge_attempts",
              "judge_concurrency", "judge_requests_per_minute", "judge_cache_dir")

SECONDS_BETWEEN_LINES = 10.0


def main():
    # Everything that can be wrong with flags, files and the endpoint is found before the model
    # is loaded.
    if FLAGS.top_p <= 0:
        raise common.UsageError("--top_p must be in (0, 1]")
    run_dir = pathlib.Path(FLAGS.run_dir)
    records = common.read_records(FLAGS.eval_file, held_out=True)
    path = common.model_path()
    model_config, tokenizer = load_config(path), load_tokenizer(path)
    prompts = common.fitting_prompts(tokenizer, records, FLAGS.representation, "evaluation")
    common.check_lengths(prompts, model_config)
    trained = (common.open_checkpoint(FLAGS.checkpoint, model_config) if FLAGS.checkpoint
               else None)
    step = trained.step if trained else None
    config = common.flag_values() | {
        "model_path": str(path), "checkpoint_step": step, "prompts_sha256": common.digest(prompts)}
    print(json.dumps(config, indent=2))
    judge, client, background = common.open_judge(run_dir)
    if FLAGS.dry_run:
        print(f"dry run: {len(prompts)} prompts x {FLAGS.num_seeds} seeds; all checks passed")
        return
    common.claim_run_dir(run_dir, config, may_change=MAY_CHANGE)

    @functools.cache
    def policy() -> Policy:
        params = trained.params(path) if trained else load(path, dtype=jnp.float32)[0]
        return Policy(matrices_in(params, FLAGS.dtype), model_config, tokenizer)

    seeds = open_seeds(run_dir, prompts, judge, background)
    progress = Progress(seeds, len(prompts) * FLAGS.num_seeds)
    sampling = SamplingConfig(1, FLAGS.max_response_tokens, temperature=FLAGS.temperature,
                              top_p=FLAGS.top_p)
    for number, seed in enumerate(seeds):
        if seed.missing:
            key = jax.random.fold_in(jax.random.key(FLAGS.seed), number)
            seed.generate(policy(), sampling, key, number,
                          functools.partial(progress.generated, number))
            progress.say(f"seed {number}")
    progress.wait()
    judgments = [seed.judgments() for seed in seeds]
    counts = [seed_counts(number, *pair) for number, pair in enumerate(zip(seeds, judgments))]

    results = {
        "format": report.FORMAT, "note": report.judge_note(FLAGS.judge_model),
        "model": str(path),
        "checkpoint": {"run": FLAGS.checkpoint, "step": step} if trained else None,
        "judge": {"model": FLAGS.judge_model, "statistics": client.stats()},
        "records": {"in_file": len(records), "too_long": len(records) - len(prompts),
                    "answered": len(prompts)},
        "seeds": counts, **figures(prompts, judgments, counts),
        "settings": config,
    }
    write_atomically(run_dir / "results.png", report.picture(results))
    write_json(run_dir / "results.json", results)
    background.submit(client.aclose()).result()
    background.close()
    print(f"\n{report.table(results)}\n\nresults.json, results.png and every response and judgment "
          f"are in {run_dir}")


def open_seeds(run_dir, prompts, judge, background) -> list[Answers]:
    """Opens each seed's answers, with what an earlier run left there.

    Raises:
      UsageError: a file there is none of an evaluation.
    """
    try:
        return [Answers(run_dir / f"seed_{seed}", prompts, judge, background)
                for seed in range(FLAGS.num_seeds)]
    except (ValueError, OSError) as error:
        raise common.UsageError(f"--run_dir={run_dir} cannot be resumed: {error}") from None


class Progress:
    """Says now and then how far the evaluation is."""

    def __init__(self, seeds: list[Answers], total: int):
        self._seeds, self._total = seeds, total
        self._start, self._tokens = time.monotonic(), 0
        self._before, self._said = sum(self._done()), self._start

    def _done(self) -> tuple[int, int]:
        """Returns the numbers of generated and of judged responses."""
        return (sum(len(seed.rows) for seed in self._seeds),
                sum(future.done() for seed in self._seeds for _, future in seed.judging))

    def generated(self, seed: int, tokens: int):
        """Notes a response."""
        self._tokens += tokens
        self._now_and_then(f"seed {seed}")

    def wait(self):
        """Waits until everything is judged."""
        pending = {future for seed in self._seeds for _, future in seed.judging}
        while pending:
            pending = concurrent.futures.wait(pending, timeout=1.0).not_done
            self._now_and_then("waiting ")
        self.say("all done")

    def _now_and_then(self, what):
        if time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self.say(what)

    def say(self, what: str):
        """Prints a line."""
        self._said = time.monotonic()
        elapsed, (generated, judged) = self._said - self._start, self._done()
        done = generated + judged - self._before
        left = elapsed / done * (2 * self._total - generated - judged) if done else 0.0
        print(f"{what}  generated {generated}/{self._total}  judged {judged}/{self._total}"
              f"  {self._tokens / elapsed:.0f} tok/s  left {duration(left)}"
              f"  SCS {self._scs()}", flush=True)

    def _scs(self) -> str:
        finished = [(record, future.result()) for seed in self._seeds
                    for record, future in seed.judging if future.done()]
        valid = [(record, [judgment]) for record, judgment in finished if judgment.valid]
        if not valid:
            return "-"
        levels = judged_levels(*zip(*valid))
        scores = calibration_metrics(levels.ideal_P_G_A[:, 0], levels.actual_P_G_A[:, 0],
                                     levels.atom_mask_P_G_A[:, 0])
        return f"{scores['SCS']:.1f}"


def seed_counts(number: int, answers: Answers, judgments: list[Judgment]) -> dict:
    """Counts a seed's responses: valid ones, invalid ones by reason, and their lengths."""
    reasons = collections.Counter(
        judgment.reason.split(":")[0] for judgment in judgments if not judgment.valid)
    rows = answers.rows.values()
    return {"seed": number, "responses": len(judgments),
            "valid": len(judgments) - reasons.total(), "invalid": dict(sorted(reasons.items())),
            "cut_at_limit": sum(row["finish_reason"] == "length" for row in rows),
            "tokens_mean": float(np.mean([len(row["tokens"]) for row in rows]))}


def figures(prompts: list[Prompt], judgments: list[list[Judgment]], counts: list[dict]) -> dict:
    """Sums up the judgments, a list a seed.

    Raises:
      NoValidResponse: a seed has none; says why, by reason.
    """
    for seed in counts:
        if not seed["valid"]:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in seed["invalid"].items())
            raise NoValidResponse(
                f"seed {seed['seed']}: none of {seed['responses']} responses has a valid judgment "
                f"({reasons}); no results were written. The responses are kept: check the judge "
                "endpoint, then start the same command again to have them judged")
    records = [prompt.record for prompt in prompts]
    levels = judged_levels(records, list(zip(*judgments)))
    return summarize(levels.ideal_P_G_A, levels.actual_P_G_A, levels.atom_mask_P_G_A,
                     levels.valid_P_G, [record.domain for record in records])


if __name__ == "__main__":
    common.run(main)
