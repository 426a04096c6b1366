"""The MLP of a layer: gated, or a mixture of gated experts."""

import jax

from memcalib_jax.models import experts, layers
from memcalib_jax.models.config import ModelConfig


def mlp(x: jax.Array, layer: dict, config: ModelConfig) -> tuple[jax.Array, jax.Array | None]:
    """Returns the stream `x [..., D]` plus its MLP, and each token's experts, int32 `[..., k]`.

    The latter are None where the MLP is no mixture.
    """
    y = layers.norm(x, layer["mlp_norm"], config)
    if not config.experts:
        return x + layers.gated(y, layer), None
    mixed, chosen = experts.mixture(y, layer, config.experts)
    return x + mixed, chosen
