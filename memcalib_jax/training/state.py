"""What training carries from step to step, and the optimizer that moves it."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import struct

from memcalib_jax.credit import init_thresholds
from memcalib_jax.models import ModelConfig
from memcalib_jax.models.lora import LoraConfig, init_adapter, with_adapter


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW at a constant rate, gradients clipped by global norm (E.2, arXiv 2609.24259)."""

    learning_rate: float = 1e-6
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0

    def build(self) -> optax.GradientTransformation:
        """Returns the optax transformation."""
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            optax.adamw(self.learning_rate, b1=self.b1, b2=self.b2, eps=self.epsilon,
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
      thresholds: float32 `[C]`, localization thresholds in nats.
    """

    step: jax.Array
    params: dict
    opt_state: optax.OptState
    thresholds: jax.Array


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
    return init_adapter(key, config, lora), Frozen(start, lora)


def init_state(params: dict, optimizer: OptimizerConfig) -> TrainState:
    """Returns the state before the first step, with float32 master weights."""
    # Copies, since an update reuses the state's memory and the start stays as the reference.
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    return TrainState(
        step=jnp.zeros((), jnp.int32), params=params,
        opt_state=jax.jit(optimizer.build().init)(params), thresholds=init_thresholds())


def matrices_in(params: dict, dtype) -> dict:
    """Returns params with the matrices in `dtype`.

    Norms, biases, rates and routers stay as they are: small, and at work in float32.
    """
    def cast(path, value):
        small = path[-1].key.endswith(("norm", "bias", "log_rate", "router"))
        return value if small else value.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
