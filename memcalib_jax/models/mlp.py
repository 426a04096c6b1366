"""The MLP of a layer: gated, or a mixture of gated experts."""

import jax

from memcalib_jax.models import experts, layers
from memcalib_jax.models.config import ModelConfig


def mlp(x: jax.Array, layer: dict, config: ModelConfig) -> jax.Array:
    """Returns the stream `x [..., D]` plus its MLP."""
    y = layers.norm(x, layer["mlp_norm"], config)
    if config.experts:
        return x + experts.mixture(y, layer, config.experts)
    return x + layers.gated(y, layer)
