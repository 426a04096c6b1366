"""The flags that say who judges, and the judge that they mean."""

import pathlib

from absl import flags

from experiments import common
from memcalib_jax.api import BackgroundLoop, ChatClient, ChatSettings
from memcalib_jax.judge import DEFAULT_INSTRUCTIONS, Judge, load_instructions

FLAGS = flags.FLAGS


def define_flags():
    """Defines the flags that say who judges."""
    flags.DEFINE_string("judge_url", None, "OpenAI-compatible base URL that ends in /v1; the key "
                        "comes from MEMCALIB_JUDGE_API_KEY.", required=True)
    flags.DEFINE_string("judge_model", None, "Model that judges.", required=True)
    flags.DEFINE_string("judge_prompt_file", None, "Text that replaces the judge's instructions.")
    flags.DEFINE_float("judge_temperature", 0.0, "Temperature of the judge.")
    flags.DEFINE_integer("judge_max_tokens", 16384, "Most tokens of a judge's reply.")
    flags.DEFINE_float("judge_timeout", 300.0, "Seconds for one attempt.")
    flags.DEFINE_integer("judge_attempts", 4, "Attempts for one judgment, the first included.")
    flags.DEFINE_integer("judge_concurrency", 64, "Most judge requests at once.")
    flags.DEFINE_integer("judge_requests_per_minute", 240, "Most judge requests a minute.")
    flags.DEFINE_string("judge_cache_dir", None,
                        "Cache of judge replies; default: judge_cache in the run folder.")


def open_judge(run_dir: pathlib.Path) -> tuple[Judge, ChatClient, BackgroundLoop]:
    """Returns the judge of the flags, its client and the loop that both run on.

    Raises:
      UsageError: bad settings or a missing key.
      ChatError: the endpoint is out of reach.
    """
    try:
        settings = _chat_settings(run_dir)
        instructions = (load_instructions(FLAGS.judge_prompt_file) if FLAGS.judge_prompt_file
                        else DEFAULT_INSTRUCTIONS)
        client = ChatClient(settings)
    except (ValueError, OSError) as error:
        raise common.UsageError(f"judge: {error}") from None
    if FLAGS.judge_cache_dir:
        common.check_folder("judge_cache_dir", pathlib.Path(FLAGS.judge_cache_dir))
    background = BackgroundLoop("judge")
    background.submit(client.probe()).result()
    return Judge(client, instructions), client, background


def _chat_settings(run_dir):
    return ChatSettings(
        FLAGS.judge_url, FLAGS.judge_model, temperature=FLAGS.judge_temperature,
        max_tokens=FLAGS.judge_max_tokens, timeout=FLAGS.judge_timeout,
        max_attempts=FLAGS.judge_attempts, max_concurrent=FLAGS.judge_concurrency,
        requests_per_minute=FLAGS.judge_requests_per_minute,
        cache_dir=FLAGS.judge_cache_dir or run_dir / "judge_cache")
