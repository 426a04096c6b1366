"""What training carries from step to step, and the optimizer that moves it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from memcalib_jax.credit import init_thresholds
from memcalib_jax.credit.thresholds import SENTENCE_FLOOR
from memcalib_jax.models import ModelConfig
from memcalib_jax.models.lora import (
    LoraConfig, adapter_axes, adapter_shapes, init_adapter, with_adapter)
from memcalib_jax.parallel import shardings


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, gradients clipped by global norm (E.2, arXiv 2609.24259).

    The rate is constant; with `total_steps` it rises over `warmup_steps` and falls by half a
    cosine, to reach 0 when `total_steps` are done.
    """

    learning_rate: float = 1e-6
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    total_steps: int | None = None

    def rate(self, steps_done: jax.Array | int) -> jax.Array:
        """Returns the rate of the step after `steps_done` others."""
        falling = self.total_steps - self.warmup_steps
        progress = jnp.clip((steps_done - self.warmup_steps) / falling, 0.0, 1.0)
        # The first step moves something already, the first after the warmup has the peak.
        rise = jnp.minimum((steps_done + 1) / (self.warmup_steps + 1), 1.0)
        return self.learning_rate * rise * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))

    def build(self) -> optax.GradientTransformation:
        """Returns the optax transformation."""
        rate = self.rate if self.total_steps else self.learning_rate
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            optax.adamw(rate, b1=self.b1, b2=self.b2, eps=self.epsilon,
                        weight_decay=self.weight_decay))


@struct.dataclass
class Frozen:
    """What training leaves as it is: the base of an adapter, or nothing.

    Attributes:
      params: the base's parameters.
      lora: the adapter's shape and scale; None where all parameters are trained.
    """

    params: dict = struct.field(default_factory=dict)
    lora: LoraConfig | None = struct.field(pytree_node=False, default=None)

    def combine(self, trained: dict) -> dict:
        """Returns the whole model: the base with `trained` beside it, without a copy."""
        return with_adapter(self.params, trained, self.lora) if self.lora else trained


@struct.dataclass
class TrainState:
    """Everything that an update changes.

    Attributes:
      step: int32 scalar, finished steps.
      params: float32 master weights of what is trained: all parameters, or an adapter.
      opt_state: the optimizer's moments.
      thresholds: float32 `[C]`, localization thresholds of tokens, in nats.
      sentence_thresholds: float32 `[C]`, those of sentence means, in nats.
    """

    step: jax.Array
    params: dict
    opt_state: optax.OptState
    thresholds: jax.Array
    sentence_thresholds: jax.Array


def split(start: dict, config: ModelConfig, lora: LoraConfig | None,
          key: jax.Array) -> tuple[dict, Frozen]:
    """Returns what is trained from `start` on, and what stays: one `combine`s with the other.

    Args:
      start: the model's parameters.
      config: the model's shape.
      lora: a new adapter is trained on the start; None: all parameters are.
      key: of the adapter's first values.
    """
    if lora is None:
        return start, Frozen()
    layout = None
    lies = start["embed"].sharding
    if isinstance(lies, NamedSharding):
        layout = shardings(adapter_axes(config, lora), adapter_shapes(config, lora), lies.mesh)
    draw = jax.jit(init_adapter, static_argnums=(1, 2), out_shardings=layout)
    return draw(key, config, lora), Frozen(start, lora)


def init_state(params: dict, optimizer: OptimizerConfig) -> TrainState:
    """Returns the state before the first step, laid out as `state_like` says.

    Master weights are float32 copies, since an update reuses the state's memory and the start
    stays as the reference.
    """
    layout = jax.tree.map(lambda x: x.sharding, state_like(params, optimizer))
    return jax.jit(functools.partial(_first_state, optimizer=optimizer), out_shardings=layout)(
        params)


def _first_state(params, *, optimizer):
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    return TrainState(
        step=jnp.zeros((), jnp.int32), params=params,
        opt_state=optimizer.build().init(params), thresholds=init_thresholds(),
        sentence_thresholds=init_thresholds(initial=SENTENCE_FLOOR))


def state_like(params: dict, optimizer: OptimizerConfig) -> TrainState:
    """Returns the shapes, dtypes and shardings of the state of training `params`.

    Moments lie as their parameters do, everything else whole on each of their devices.
    """
    def keys(path):
        return tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey))

    params = jax.tree.map(  # arrays of numpy lie nowhere yet
        lambda x: x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x), params)
    shardings = {keys(path): x.sharding for path, x in jax.tree.leaves_with_path(params)}
    rest = next(iter(shardings.values()))
    if isinstance(rest, NamedSharding):
        rest = NamedSharding(rest.mesh, PartitionSpec())
    return jax.tree.map_with_path(
        lambda path, x: jax.ShapeDtypeStruct(x.shape, x.dtype,
                                             sharding=shardings.get(keys(path), rest)),
        jax.eval_shape(functools.partial(_first_state, optimizer=optimizer), params))


def matrices_in(params: dict, dtype) -> dict:
    """Returns params with the matrices in `dtype`.

    Norms, biases, rates and routers stay as they are: small, and at work in float32.
    """
    def cast(path, value):
        small = path[-1].key.endswith(("norm", "bias", "log_rate", "router"))
        return value if small else value.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
