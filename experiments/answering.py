"""What evaluations share: every record answered under several seeds, and each answer judged."""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from experiments import common, policies
from memcalib_jax.api import BackgroundLoop
from memcalib_jax.judge import Judge, Judgment
from memcalib_jax.parallel import multihost
from memcalib_jax.training.advantages import JudgedLevels, judged_levels
from memcalib_jax.training.answering import Answers
from memcalib_jax.training.logging import duration
from memcalib_jax.training.rollouts import Prompt
from memcalib_jax.training.step import NoValidResponse

# Flags that may differ when an evaluation is resumed: they change no response or judgment.
MAY_CHANGE = ("num_seeds", "dry_run", "run_dir", "judge_url", "judge_timeout", "judge_attempts",
              "judge_concurrency", "judge_requests_per_minute", "judge_cache_dir",
              *policies.MAY_CHANGE)

SECONDS_BETWEEN_LINES = 10.0


def open_seeds(run_dir: pathlib.Path, num_seeds: int, prompts: Sequence[Prompt], judge: Judge,
               background: BackgroundLoop) -> list[Answers]:
    """Opens each seed's answers, with what an earlier run left there.

    Raises:
      UsageError: a file there is none of an evaluation.
    """
    try:
        return [Answers(run_dir / f"seed_{seed}", seed, prompts, judge, background)
                for seed in range(num_seeds)]
    except (ValueError, OSError) as error:
        raise common.UsageError(f"--run_dir={run_dir} cannot be resumed: {error}") from None


def answer(seeds: list[Answers], setup: policies.Setup, metric: str,
           metrics: Callable[..., dict]) -> tuple[list[dict], list[list[Judgment]]]:
    """Gets the responses that are missing, waits for every judgment, and says how far it is.

    Args:
      seeds: from `open_seeds`.
      setup: who answers.
      metric: what to show of the judgments so far, a name of what `metrics` returns.
      metrics: computes it from ideal and actual levels and their mask, `[N, A]`.

    Returns:
      For each seed the counts of its responses and their judgments, a prompt each.
    """
    progress = _Progress(seeds, len(seeds) * len(setup.prompts), metric, metrics)
    for seed in seeds:
        multihost.gather([prompt.record.id for prompt in seed.missing])
        if seed.missing:
            setup.answer(seed, functools.partial(progress.generated, seed.seed))
            progress.say(f"seed {seed.seed}")
    progress.wait()
    judgments = [seed.judgments() for seed in seeds]
    return [_counts(*pair) for pair in zip(seeds, judgments)], judgments


def sample_along(setup: policies.Setup, num_seeds: int):
    """Does the share of another process in the sampling of `answer`, which keeps the responses."""
    for seed in range(num_seeds):
        missing = set(multihost.gather(None)[0])
        if missing:
            setup.sample_along(seed, [prompt for prompt in setup.prompts
                                      if prompt.record.id in missing])


def counted(num_in_file: int, prompts: Sequence[Prompt]) -> dict:
    """Counts the records of an evaluation, and identifies those that were answered.

    The hash is of the records alone, so that evaluations of different models can be compared.
    """
    rows = [dataclasses.asdict(prompt.record) for prompt in prompts]
    content = json.dumps(rows, sort_keys=True).encode()
    return {"in_file": num_in_file, "too_long": num_in_file - len(prompts),
            "answered": len(prompts), "sha256": hashlib.sha256(content).hexdigest()}


def levels(prompts: Sequence[Prompt], counts: Sequence[dict],
           judgments: Sequence[Sequence[Judgment]]) -> JudgedLevels:
    """Lays what `answer` returned out as arrays; the second axis is seeds.

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
    return judged_levels([prompt.record for prompt in prompts], list(zip(*judgments)))


def _counts(answers: Answers, judgments: list[Judgment]) -> dict:
    """Counts a seed's responses: valid ones, invalid ones by reason, and their lengths."""
    reasons = collections.Counter(
        judgment.reason.split(":")[0] for judgment in judgments if not judgment.valid)
    rows = answers.rows.values()
    lengths = [row.get("num_tokens") if row["tokens"] is None else len(row["tokens"])
               for row in rows]
    known = [length for length in lengths if length is not None]
    return {"seed": answers.seed, "responses": len(judgments),
            "valid": len(judgments) - reasons.total(), "invalid": dict(sorted(reasons.items())),
            "cut_at_limit": sum(row["finish_reason"] == "length" for row in rows),
            "tokens_mean": float(np.mean(known)) if known else None}


class _Progress:
    """Says now and then how far the evaluation is."""

    def __init__(self, seeds, total, metric, metrics):
        self._seeds, self._total = seeds, total
        self._metric, self._metrics = metric, metrics
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
              f"  {self._metric} {self._so_far()}", flush=True)

    def _so_far(self) -> str:
        finished = [(record, future.result()) for seed in self._seeds
                    for record, future in seed.judging if future.done()]
        valid = [(record, [judgment]) for record, judgment in finished if judgment.valid]
        if not valid:
            return "-"
        judged = judged_levels(*zip(*valid))
        scores = self._metrics(judged.ideal_P_G_A[:, 0], judged.actual_P_G_A[:, 0],
                               judged.atom_mask_P_G_A[:, 0])
        return f"{scores[self._metric]:.1f}"
