"""What the programs share that make data through endpoints: flags, clients, a clean end."""

import asyncio
import contextlib
import hashlib
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence

from absl import flags

from experiments import common
from memcalib_jax import construction
from memcalib_jax.api import ChatClient, ChatSettings
from memcalib_jax.api.budget import Budget, read_prices
from memcalib_jax.api.client import JOURNAL_NAME
from memcalib_jax.api.journal import read_journal
from memcalib_jax.construction import stand_in
from memcalib_jax.construction.decisions import PROMPT_NAMES, Asker
from memcalib_jax.construction.journal import FAILED, REJECTED
from memcalib_jax.construction.pipeline import Pipeline
from memcalib_jax.construction.schemas import SCHEMAS
from memcalib_jax.prompt_files import load_prompts

FLAGS = flags.FLAGS

SECONDS_BETWEEN_LINES = 10.0
MAY_CHANGE = ("run_dir", "generator_url", "reviewer_urls", "call_timeout", "call_attempts",
              "concurrency", "requests_per_minute", "tokens_per_minute", "hedge_after",
              "price_file", "budget_tokens", "budget_money", "cache_dir", "prompts_dir")
_KEYS = ("MEMCALIB_GENERATOR_API_KEY", "MEMCALIB_REVIEWER_1_API_KEY", "MEMCALIB_REVIEWER_2_API_KEY")


def define_call_flags():
    """Defines the flags that say who is asked, and how hard."""
    flags.DEFINE_boolean("stand_in", False, "Ask a scripted stand-in, started for the run: the "
                         "form of the real thing, without a model.")
    flags.DEFINE_string("generator_url", None, "OpenAI-compatible base URL of the generator, which "
                        "ends in /v1; the key comes from MEMCALIB_GENERATOR_API_KEY.")
    flags.DEFINE_string("generator_model", None, "Model that generates.")
    flags.DEFINE_list("reviewer_urls", None, "Base URLs of the two reviewers; default: the "
                      "generator's. Keys: MEMCALIB_REVIEWER_1_API_KEY and ..._2_..., or at the "
                      "generator's URL its own.")
    flags.DEFINE_list("reviewer_models", None, "Models of the two reviewers, with a comma.")
    flags.DEFINE_float("generator_temperature", 0.7, "Temperature of the generator; reviewers "
                       "have 0.", lower_bound=0.0, upper_bound=2.0)
    flags.DEFINE_integer("call_max_tokens", 16384, "Most tokens of a reply.", lower_bound=1)
    flags.DEFINE_float("call_timeout", 300.0, "Seconds for one attempt.", lower_bound=0.01)
    flags.DEFINE_integer("call_attempts", 4, "Attempts for one reply, the first included.",
                         lower_bound=1)
    flags.DEFINE_integer("concurrency", 64, "Most requests at once.", lower_bound=1)
    flags.DEFINE_integer("requests_per_minute", 240, "Most requests a minute to one endpoint.",
                         lower_bound=1)
    flags.DEFINE_integer("tokens_per_minute", None, "Most tokens a minute to one endpoint, of "
                         "prompts and replies; default: no limit.", lower_bound=1)
    flags.DEFINE_float("hedge_after", None, "Ask a second time after so many seconds without an "
                       "answer; default: never.", lower_bound=0.001)
    flags.DEFINE_string("price_file", None, 'JSON of prices for a million tokens: {"MODEL": '
                        '{"prompt": 0.5, "completion": 1.5}}.')
    flags.DEFINE_integer("budget_tokens", None, "Most tokens of the run, over all its starts.",
                         lower_bound=1)
    flags.DEFINE_float("budget_money", None, "Most money of the run, over all its starts, by "
                       "--price_file.", lower_bound=0.0)
    flags.DEFINE_string("cache_dir", None, "Cache of replies and journal of calls; default: cache "
                        "in the run folder.")
    flags.DEFINE_string("prompts_dir", None, "Folder of .txt files that replace prompts of the "
                        "same name in memcalib_jax/construction/prompts.")


def read_prompts() -> dict[str, str]:
    """Returns the prompts of --prompts_dir.

    Raises:
      UsageError: they will not do.
    """
    try:
        return load_prompts(construction.__name__, PROMPT_NAMES, FLAGS.prompts_dir)
    except ValueError as error:
        raise common.UsageError(f"--prompts_dir: {error}") from None


def models() -> list[str]:
    """Returns the names of the generator and the two reviewers.

    Raises:
      UsageError: the flags do not say whom to ask.
    """
    if FLAGS.stand_in:
        return list(stand_in.MODEL_NAMES)
    for name in ("generator_url", "generator_model", "reviewer_models"):
        if not FLAGS[name].value:
            raise common.UsageError(f"--{name} is needed (or --stand_in, to try without a model)")
    if len(FLAGS.reviewer_models) != 2 or len(FLAGS.reviewer_urls or ["", ""]) != 2:
        raise common.UsageError("--reviewer_models and --reviewer_urls name two reviewers, with a "
                                "comma")
    if len(set(zip(_urls()[1:], FLAGS.reviewer_models))) < 2:
        raise common.UsageError("--reviewer_models: the two reviewers are the same; they review "
                                "independently only if they differ")
    return [FLAGS.generator_model, *FLAGS.reviewer_models]


def _urls():
    return [FLAGS.generator_url, *(FLAGS.reviewer_urls or [FLAGS.generator_url] * 2)]


def digest(path: str) -> str:
    """Hashes a file, so that a resume finds out if it changed."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Session:
    """The generator and reviewers of a run, what it spends, and its orderly end.

    Attributes:
      generator, reviewers: who is asked.
      budget: what was spent, by earlier starts of the run too.
      stopping: whether the user asked for the end, so that no call is started any more.
    """

    def __init__(self, run_dir: pathlib.Path, prompts: dict[str, str], urls: Sequence[str]):
        cache = pathlib.Path(FLAGS.cache_dir or run_dir / "cache")
        self.budget = _budget(cache / JOURNAL_NAME)
        self.stopping = False
        # A reviewer at the generator's own endpoint needs no key of its own.
        variables = [_KEYS[0] if url == urls[0] and name not in os.environ else name
                     for url, name in zip(urls, _KEYS)]
        temperatures = (FLAGS.generator_temperature, 0.0, 0.0)
        self.clients = [ChatClient(ChatSettings(
            url, model, temperature=temperature, max_tokens=FLAGS.call_max_tokens,
            timeout=FLAGS.call_timeout, max_attempts=FLAGS.call_attempts,
            max_concurrent=FLAGS.concurrency, requests_per_minute=FLAGS.requests_per_minute,
            tokens_per_minute=FLAGS.tokens_per_minute, hedge_after=FLAGS.hedge_after,
            cache_dir=cache, key_variable=variable), budget=self.budget)
            for url, model, temperature, variable in zip(urls, models(), temperatures, variables)]
        self.generator, *self.reviewers = (
            Asker(client, prompts, SCHEMAS) for client in self.clients)

    def spent(self) -> str:
        """Says what was spent."""
        money = f"  cost {self.budget.money:.4f}" if FLAGS.price_file else ""
        return f"tokens {self.budget.tokens:,}{money}"

    def progress(self, pipeline: Pipeline, total: int, seconds: float) -> str:
        """Says on one line how far a run is, what it rejected and why, and what it took."""
        rejected, failed = (pipeline.counts_of(kind) for kind in (REJECTED, FAILED))
        done = pipeline.num_passed + rejected.total()
        line = f"done {done}/{total}  kept {pipeline.num_passed}  rejected {rejected.total()}"
        if rejected:
            line += " (" + ", ".join(f"{name} {count}"
                                     for name, count in rejected.most_common(4)) + ")"
        line += f"  failed {failed.total()}  {self.spent()}"
        if pipeline.passed_now and done < total:
            left = int(seconds / pipeline.passed_now * (total - done))
            line += f"  left {left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
        return line

    def check_budget(self):
        """Refuses to call a run done that its budget ended.

        Raises:
          UsageError: a call was refused.
        """
        if any(client.stats()["failures"]["budget"] for client in self.clients):
            raise common.UsageError(f"the budget is spent ({self.spent()}); the same command with "
                                    "a larger --budget_tokens or --budget_money goes on")

    async def run(self, work: Coroutine, line: Callable[[], str]):
        """Awaits the work, printing a line now and then, and stops it when the user asks.

        The first Ctrl-C lets calls that are out come back, the second drops them.

        Raises:
          KeyboardInterrupt: the user stopped it.
        """
        try:
            for client in self.clients:
                await client.probe()
        except BaseException:
            work.close()
            raise
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)

        def interrupt():
            if self.stopping:
                task.cancel()
            else:
                self.stopping = True
                for client in self.clients:
                    client.stop()
                print("\nstopping: waiting for calls that are out; Ctrl-C again drops them",
                      file=sys.stderr, flush=True)

        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, interrupt)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=SECONDS_BETWEEN_LINES)
                print(line(), flush=True)
            if self.stopping and (task.cancelled() or not task.exception()):
                raise KeyboardInterrupt
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for client in self.clients:
                await client.aclose()


def _budget(journal: pathlib.Path) -> Budget:
    """Makes the budget of the flags, less what the journal of the cache tells was spent."""
    if FLAGS.budget_money is not None and not FLAGS.price_file:
        raise ValueError("--budget_money needs a --price_file")
    prices = read_prices(FLAGS.price_file) if FLAGS.price_file else {}
    unpriced = [model for model in models() if prices and model not in prices]
    if unpriced:
        raise ValueError(f"--price_file={FLAGS.price_file} has no price of {unpriced[0]}")
    budget = Budget(max_tokens=FLAGS.budget_tokens, max_money=FLAGS.budget_money, prices=prices)
    past = read_journal(journal)
    for model in past.prompt_tokens.keys() | past.completion_tokens.keys():
        budget.spend(model, past.prompt_tokens[model], past.completion_tokens[model])
    if past.open_keys:
        print(f"{len(past.open_keys)} calls were out when the run last ended; they are made again "
              "where they are needed")
    return budget


@contextlib.contextmanager
def open_session(run_dir: pathlib.Path, prompts: dict[str, str]) -> Iterator[Session]:
    """Opens the clients of the flags, with the stand-in behind them if that is asked.

    Raises:
      UsageError: bad settings or a missing key.
    """
    with contextlib.ExitStack() as stack:
        urls = _urls()
        if FLAGS.stand_in:
            urls = [stack.enter_context(stand_in.serve()).base_url] * 3
        try:
            session = Session(run_dir, prompts, urls)
        except ValueError as error:
            raise common.UsageError(str(error)) from None
        yield session
