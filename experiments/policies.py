"""Who answers in an evaluation: a model on this machine, a chat endpoint, or a file."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from absl import flags

from experiments import common, devices
from memcalib_jax.api import BackgroundLoop, ChatClient, ChatError, ChatSettings
from memcalib_jax.data import Record, build_messages
from memcalib_jax.models import load, load_config, load_tokenizer
from memcalib_jax.training.answering import Answers
from memcalib_jax.training.rollouts import Policy, Prompt, SamplingConfig, roll_out
from memcalib_jax.training.state import matrices_in

FLAGS = flags.FLAGS

KEY_VARIABLE = "MEMCALIB_POLICY_API_KEY"

# Flags that may differ when an evaluation is resumed: they change no response.
MAY_CHANGE = ("policy_url", "policy_timeout", "policy_attempts", "policy_concurrency",
              "policy_requests_per_minute", "policy_cache_dir", "responses_file")


@dataclasses.dataclass(frozen=True)
class Setup:
    """Who answers what.

    Attributes:
      prompts: the records that are answered.
      answer: given a seed's answers, gets the missing ones; calls its second argument with the
        number of tokens as each comes.
      sample_along: samples a seed's responses to some prompts without keeping them, as every
        process does where a model is spread over several.
      origin: returns who answered, as results name them.
      config: the flags, and what else must be the same for a resume.
    """

    prompts: list[Prompt]
    answer: Callable[[Answers, Callable[[int], None]], None]
    sample_along: Callable[[int, list[Prompt]], None] | None
    origin: Callable[[], dict]
    config: dict


def define_policy_flags():
    """Defines the flags that say which policy answers, if none of --model_path."""
    flags.DEFINE_string("checkpoint", None, "Folder of a training run, whose newest checkpoint "
                        "gives the parameters; --model_path gives their shape and the tokenizer.")
    flags.DEFINE_string("policy_url", None, "OpenAI-compatible base URL that ends in /v1, whose "
                        f"--policy_model answers in place of --model_path; the key comes from "
                        f"{KEY_VARIABLE}. Thinking is turned off where the endpoint knows how; "
                        "prompts of any length are sent. "
                        "Start vLLM with --generation-config=vllm: a model's own top_k would "
                        "narrow its answers.")
    flags.DEFINE_string("policy_model", None, "Model that answers at --policy_url, or that made "
                        "--responses_file.")
    flags.DEFINE_float("policy_timeout", 300.0, "Seconds for one attempt.")
    flags.DEFINE_integer("policy_attempts", 4, "Attempts for one response, the first included.")
    flags.DEFINE_integer("policy_concurrency", 64, "Most policy requests at once.")
    flags.DEFINE_integer("policy_requests_per_minute", 240, "Most policy requests a minute.")
    flags.DEFINE_string("policy_cache_dir", None,
                        "Cache of policy replies; default: policy_cache in the run folder.")
    flags.DEFINE_string("responses_file", None, "Responses made elsewhere, in place of "
                        "--model_path (JSONL): objects with id, seed (0, 1, ...) and response.")


def set_up(records: Sequence[Record], representation: str, what: str, sampling: SamplingConfig,
           run_dir: pathlib.Path) -> Setup:
    """Checks the flags of the policy, and makes it ready to answer the records.

    Args:
      records: what is asked.
      representation: how prompts word their memories.
      what: the records' name in messages.
      sampling: how responses are drawn; one sample each.
      run_dir: the run's folder.

    Raises:
      UsageError: flags that contradict each other, or what they name will not do.
      ChatError: the endpoint is out of reach.
    """
    elsewhere = [name for name in ("policy_url", "responses_file") if FLAGS[name].value]
    here = [name for name in ("model_path", "checkpoint") if FLAGS[name].value]
    if len(elsewhere) + bool(here and elsewhere) > 1:
        raise common.UsageError(
            f"{' and '.join(f'--{name}' for name in here + elsewhere)} each say who answers: "
            "give one")
    if FLAGS.policy_model and not elsewhere:
        raise common.UsageError("--policy_model names the model at --policy_url, or the one that "
                                "made --responses_file: give one of them")
    if elsewhere and jax.process_count() > 1:
        raise common.UsageError(f"--{elsewhere[0]} needs one process, not {jax.process_count()}")
    if FLAGS.policy_url:
        return _endpoint(records, representation, sampling, run_dir)
    if FLAGS.responses_file:
        return _file(records)
    return _model(records, representation, what, sampling)


def _model(records, representation, what, sampling) -> Setup:
    """Sets up a model on this machine; loads it when the first response is missing."""
    path = common.model_path()
    model_config, tokenizer = load_config(path), load_tokenizer(path)
    prompts = common.fitting_prompts(tokenizer, records, representation, what)
    common.check_lengths(prompts, model_config)
    trained = (common.open_checkpoint(FLAGS.checkpoint, model_config) if FLAGS.checkpoint
               else None)
    step = trained.step if trained else None

    @functools.cache
    def policy() -> Policy:
        params = trained.params(path) if trained else load(
            path, dtype=jnp.float32, shardings=devices.parameter_shardings(model_config))[0]
        return Policy(matrices_in(params, FLAGS.dtype), model_config, tokenizer)

    def key(seed):
        return jax.random.fold_in(jax.random.key(FLAGS.seed), seed)

    def answer(answers, on_response):
        if answers.missing:
            answers.generate(policy(), sampling, key(answers.seed), on_response)

    def sample_along(seed, prompts):
        roll_out(policy(), prompts, sampling, key(seed), None)

    origin = {"model": str(path),
              "checkpoint": {"run": FLAGS.checkpoint, "step": step} if trained else None}
    config = common.flag_values() | {
        "model_path": str(path), "checkpoint_step": step, "prompts_sha256": common.digest(prompts)}
    return Setup(prompts, answer, sample_along, lambda: origin, config)


def _endpoint(records, representation, sampling, run_dir) -> Setup:
    """Sets up a model behind a chat endpoint; each seed has its own place in the cache."""
    if not FLAGS.policy_model:
        raise common.UsageError("--policy_url needs --policy_model: a model that it serves")
    try:
        client = ChatClient(ChatSettings(
            FLAGS.policy_url, FLAGS.policy_model, temperature=sampling.temperature,
            top_p=sampling.top_p, max_tokens=sampling.max_tokens, timeout=FLAGS.policy_timeout,
            max_attempts=FLAGS.policy_attempts, max_concurrent=FLAGS.policy_concurrency,
            requests_per_minute=FLAGS.policy_requests_per_minute, key_variable=KEY_VARIABLE,
            cache_dir=FLAGS.policy_cache_dir or run_dir / "policy_cache"))
    except (ValueError, OSError) as error:
        raise common.UsageError(f"policy: {error}") from None
    background = BackgroundLoop("policy")
    background.submit(client.probe()).result()
    prompts = [Prompt(index, record, ()) for index, record in enumerate(records)]

    def answer(answers, on_response):
        async def ask(prompt):
            try:
                reply = await client.complete(
                    build_messages(prompt.record, representation=representation),
                    sample_index=answers.seed, allow_empty=True)
            except ChatError as error:
                answers.fail(prompt, f"policy_{error.kind}: {error}"[:500])
                return on_response(0)
            # A cached reply and an endpoint that does not count have no number of tokens.
            answers.add(prompt, reply.text, num_tokens=reply.completion_tokens or None,
                        finish_reason=reply.finish_reason)
            on_response(reply.completion_tokens)

        for future in [background.submit(ask(prompt)) for prompt in answers.take_missing()]:
            future.result()

    def origin():
        return {"model": FLAGS.policy_model, "checkpoint": None,
                "policy": {"url": client.settings.base_url, "statistics": client.stats(),
                           "thinking_turned_off_by": client.thinking_field}}

    asked = [[record.id, build_messages(record, representation=representation)]
             for record in records]
    config = common.flag_values() | {
        "prompts_sha256": hashlib.sha256(json.dumps(asked).encode()).hexdigest()}
    return Setup(prompts, answer, None, origin, config)


def _file(records) -> Setup:
    """Sets up responses that were made elsewhere; records without one count as failures."""
    path = pathlib.Path(FLAGS.responses_file)
    responses, digest = _read_responses(path, {record.id for record in records})
    prompts = [Prompt(index, record, ()) for index, record in enumerate(records)]
    absent = {seed: [record.id for record in records if (record.id, seed) not in responses]
              for seed in range(FLAGS.num_seeds)}
    for seed, ids in absent.items():
        if len(ids) == len(records):
            raise common.UsageError(f"{path} has no response of seed {seed}: lower --num_seeds="
                                    f"{FLAGS.num_seeds} to the seeds that it has")
        if ids:
            print(f"{path} lacks {len(ids)} of {len(records)} responses of seed {seed}, which "
                  f"count as invalid: {', '.join(ids[:5])}{' ...' if len(ids) > 5 else ''}")

    def answer(answers, on_response):
        for prompt in answers.take_missing():
            text = responses.get((prompt.record.id, answers.seed))
            if text is None:
                answers.fail(prompt, "missing_response: the file has none")
            else:
                answers.add(prompt, text)
            on_response(0)

    origin = {"model": FLAGS.policy_model or path.stem, "checkpoint": None,
              "policy": {"responses_file": str(path), "sha256": digest}}
    config = common.flag_values() | {
        "prompts_sha256": hashlib.sha256(json.dumps([
            dataclasses.asdict(record) for record in records]).encode()).hexdigest(),
        "responses_sha256": digest}
    return Setup(prompts, answer, None, lambda: origin, config)


def _read_responses(path, ids) -> tuple[dict[tuple[str, int], str], str]:
    """Returns the responses by record id and seed, and the file's hash.

    Raises:
      UsageError: a line is no response, or one of an unknown record, a seed that is not asked
        for, or a record and seed that an earlier line has.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise common.UsageError(f"--responses_file={path} cannot be read: "
                                f"{error.strerror}") from None
    responses, line_of = {}, {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        record_id, seed, text = _response(line, where)
        if record_id not in ids:
            raise common.UsageError(f"{where}: record {record_id!r} is not among the records of "
                                    "--eval_file")
        if not 0 <= seed < FLAGS.num_seeds:
            raise common.UsageError(f"{where}: seed {seed} of record {record_id!r} is not among "
                                    f"the --num_seeds={FLAGS.num_seeds} (0, 1, ...)")
        if (record_id, seed) in responses:
            raise common.UsageError(f"{where}: record {record_id!r} has a response of seed {seed} "
                                    f"on line {line_of[record_id, seed]} already")
        responses[record_id, seed], line_of[record_id, seed] = text, number
    return responses, hashlib.sha256(data).hexdigest()


def _response(line, where):
    try:
        row = json.loads(line)
        record_id, seed, text = row["id"], row["seed"], row["response"]
        fits = isinstance(record_id, str) and type(seed) is int and isinstance(text, str)
    except (ValueError, TypeError, KeyError, RecursionError):
        fits = False
    if not fits:
        raise common.UsageError(f'{where}: no response; a line is an object such as {{"id": '
                                '"record-1", "seed": 0, "response": "text"}')
    return record_id, seed, text
