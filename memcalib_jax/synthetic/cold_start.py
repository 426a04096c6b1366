"""The model that training starts from: it copies well and uses memories by habit."""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from memcalib_jax.models import ModelConfig
from memcalib_jax.models.rope import Rope
from memcalib_jax.synthetic.records import draw_records
from memcalib_jax.synthetic.responses import Habits, echoes, habitual
from memcalib_jax.synthetic.vocabulary import END, words
from memcalib_jax.training.checkpoint import Checkpoints
from memcalib_jax.training.rollouts import Policy
from memcalib_jax.training.runner import RunConfig
from memcalib_jax.training.sft import LikelihoodConfig, SftConfig, fine_tune, to_pair
from memcalib_jax.training.state import OptimizerConfig

SAVE_EVERY = 500  # a cold start that was stopped goes on from there


@dataclasses.dataclass(frozen=True)
class ColdStart:
    """How the start is made.

    Attributes:
      echo_steps, habit_steps: optimizer steps on echoes, then on habitual responses.
      batch_size: responses of a step.
      learning_rate: the highest of AdamW, in both phases.
      records: drawn for each phase.
      bin_tokens: about the most tokens of one device call's bin.
    """

    echo_steps: int = 400
    habit_steps: int = 1600
    batch_size: int = 64
    learning_rate: float = 6e-3
    records: int = 20_000
    bin_tokens: int = 1024


def model_config() -> ModelConfig:
    """Returns the shape: Qwen3's, 3 layers of width 64."""
    vocabulary = words()
    return ModelConfig(
        "qwen3", vocab_size=len(vocabulary), hidden_size=64, intermediate_size=192, num_layers=2,
        num_heads=2, num_kv_heads=2, head_dim=64, rope=Rope(theta=1e6), qk_norm=True,
        max_positions=128,
        eos_ids=(vocabulary.index(END),))


def init_params(config: ModelConfig, key: jax.Array) -> dict:
    """Draws float32 parameters: norms 1, matrices normal with the inverse root of their inputs."""
    def draw(path, shape):
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.ones(shape, jnp.float32)
        inputs = {"o": config.num_heads * config.head_dim, "down": config.intermediate_size}
        scale = inputs.get(name, config.hidden_size) ** -0.5
        leaf = jax.random.fold_in(key, sum(map(ord, jax.tree_util.keystr(path))))
        return scale * jax.random.normal(leaf, shape, jnp.float32)

    return jax.tree_util.tree_map_with_path(
        draw, config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple))


def make_cold_start(folder: pathlib.Path, settings: ColdStart, tokenizer, seed: int,
               report: Callable[[str], None]) -> Policy:
    """Returns the start of a seed, made here or taken from `folder` where it is there already.

    Habits, records and first parameters are drawn from the seed.
    """
    config = model_config()
    params = init_params(config, jax.random.key(seed))
    habits = Habits.draw(np.random.default_rng([seed, 0]))
    phases = (
        ("echo", settings.echo_steps, lambda records: echoes(records, seed=[seed, 1])),
        ("habit", settings.habit_steps,
         lambda records: habitual(records, habits, seed=[seed, 2])))
    for number, (name, steps, demonstrate) in enumerate(phases):
        done = _finished(folder / name, steps, params)
        if done is not None:
            params = done
            continue
        records = draw_records(settings.records, seed=[seed, 3 + number], name=name)
        pairs = [to_pair(tokenizer, config, demonstration, "atomic")
                 for demonstration in demonstrate(records)]
        optimizer = OptimizerConfig(learning_rate=settings.learning_rate,
                                    warmup_steps=steps // 20, total_steps=steps)
        params = fine_tune(
            RunConfig(folder / name, steps, save_every=SAVE_EVERY, seed=seed),
            SftConfig(LikelihoodConfig("float32", "none"), optimizer, settings.batch_size,
                      settings.bin_tokens, eval_every=steps),
            params, config, pairs, [], lambda line: report(f"cold start, {name}: {line}")).params
    return Policy(params, config, tokenizer)


def _finished(folder: pathlib.Path, steps: int, like: dict) -> dict | None:
    """Returns the parameters of a phase that has all its steps, or None."""
    if not (folder / "checkpoints").is_dir():
        return None
    checkpoints = Checkpoints(folder / "checkpoints")
    done = checkpoints.latest() == steps
    params = checkpoints.restore_params(steps, like) if done else None
    checkpoints.close()
    return params
