"""Low-rank adapters (LoRA, arXiv 2106.09685): small trained matrices beside frozen projections.

An adapter adds `(alpha / rank) x A B` to a projection of `x`. It is a tree of its own, shaped like
the layers it belongs to; `layers.project` applies what `with_adapter` put beside the weights. There
is no dropout: old, reference and counterfactual log-probs must come from one and the same policy.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.weights.families import PARAMETERS, flat_shapes

ALL_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The size of an adapter and what it is attached to.

    Attributes:
      rank: inner dimension of A B.
      alpha: the product is scaled by `alpha / rank`.
      targets: projections, by their names in the parameter tree ("q") or on the Hugging Face hub
        ("q_proj"), or "all-linear" for every one that can have an adapter. A name stands for all
        layers that have such a projection.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"the rank of an adapter must be at least 1, not {self.rank}")
        if self.alpha <= 0:
            raise ValueError(f"alpha of an adapter must be above 0, not {self.alpha}")

    @property
    def scale(self) -> float:
        """Factor of the product A B."""
        return self.alpha / self.rank


def target_paths(config: ModelConfig, targets: tuple[str, ...]) -> list[str]:
    """Returns the paths of the projections that `targets` name, in the order of the tree.

    Raises:
      ValueError: a name is none of a projection of this model, or of one that has no adapter
        (routers and stacked experts); says which names there are.
    """
    projections = {path: names for path in flat_shapes(config) if (names := _names(path))}
    chosen = set()
    for target in targets:
        named = {path for path, names in projections.items() if target in (*names, ALL_LINEAR)}
        allowed = {path for path in named if _can_have_adapter(path)}
        if not allowed:
            known = sorted({names[0] for path, names in projections.items()
                            if _can_have_adapter(path)})
            reason = ("is a router or a stack of experts, which have no adapters" if named else
                      f"is no projection of a {config.family} model")
            raise ValueError(f"adapter target {target!r} {reason}; there are {', '.join(known)} "
                             f"(or {ALL_LINEAR})")
        chosen |= allowed
    if not chosen:
        raise ValueError("an adapter needs at least one target")
    return [path for path in projections if path in chosen]


def _names(path):
    """Returns what a projection is called here and on the hub; nothing for other parameters."""
    placement = PARAMETERS[path]
    if "/" not in path or not placement.input_axes:
        return ()
    return path.split("/")[-1], placement.names.hugging_face.split(".")[-2]


def _can_have_adapter(path):
    name = path.split("/")[-1]
    return not (name.endswith("router") or name.startswith("expert_"))


def adapter_shapes(config: ModelConfig, lora: LoraConfig) -> dict:
    """Returns the tree of an adapter's shapes.

    `layers/q_lora_a [L, D, r]`, `layers/q_lora_b [L, r, H, d]` and so on: input axes, then the
    rank, and the rank, then output axes, under each target's name.
    """
    base, shapes = flat_shapes(config), {}
    for path in target_paths(config, lora.targets):
        split = 1 + PARAMETERS[path].input_axes
        shapes[f"{path}_lora_a"] = (*base[path][:split], lora.rank)
        shapes[f"{path}_lora_b"] = (base[path][0], lora.rank, *base[path][split:])
    return unflatten_dict(shapes, sep="/")


def adapter_axes(config: ModelConfig, lora: LoraConfig) -> dict:
    """Returns the logical names of an adapter's axes, those of its projections and "rank"."""
    axes = {}
    for path in target_paths(config, lora.targets):
        names, split = PARAMETERS[path].axes, 1 + PARAMETERS[path].input_axes
        axes[f"{path}_lora_a"] = (*names[:split], "rank")
        axes[f"{path}_lora_b"] = (names[0], "rank", *names[split:])
    return unflatten_dict(axes, sep="/")


def init_adapter(key: jax.Array, config: ModelConfig, lora: LoraConfig) -> dict:
    """Draws an adapter that changes nothing yet: A uniform, B zero, float32.

    A is uniform within 1 / sqrt(inputs), as in the PEFT library.

    Args:
      key: folded with a projection's place in the model, so that its A does not depend on the
        other targets.
      config: the model's shape.
      lora: rank and targets.
    """
    places = {path: place for place, path in enumerate(sorted(flat_shapes(config)))}
    adapter = {}
    for path, shape in flatten_dict(adapter_shapes(config, lora), sep="/").items():
        if path.endswith("_lora_a"):
            bound = math.prod(shape[1:-1]) ** -0.5
            place = places[path.removesuffix("_lora_a")]
            adapter[path] = jax.random.uniform(
                jax.random.fold_in(key, place), shape, jnp.float32, -bound, bound)
        else:
            adapter[path] = jnp.zeros(shape, jnp.float32)
    return unflatten_dict(adapter, sep="/")


def with_adapter(params: dict, adapter: dict, lora: LoraConfig) -> dict:
    """Returns the parameters with the adapter beside them; the base arrays are not copied.

    `alpha / rank` is folded into B. The base alone is `params`, which stays as it is.
    """
    scaled = {path: value * lora.scale if path.endswith("_lora_b") else value
              for path, value in flatten_dict(adapter, sep="/").items()}
    return unflatten_dict(flatten_dict(params, sep="/") | scaled, sep="/")


def merge(params: dict, adapter: dict, lora: LoraConfig) -> dict:
    """Returns the parameters with `(alpha / rank) A B` added, in the dtypes of `params`."""
    merged, factors = flatten_dict(params, sep="/"), flatten_dict(adapter, sep="/")
    for path in [path.removesuffix("_lora_a") for path in factors if path.endswith("_lora_a")]:
        weight, a, b = merged[path], factors[f"{path}_lora_a"], factors[f"{path}_lora_b"]
        product = jnp.einsum(
            "lir,lro->lio", a.reshape(len(a), -1, lora.rank), b.reshape(len(b), lora.rank, -1),
            precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        merged[path] = (weight + lora.scale * product.reshape(weight.shape)).astype(weight.dtype)
    return unflatten_dict(merged, sep="/")
