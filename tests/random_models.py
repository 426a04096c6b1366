"""Random parameters of small models, shared by the tests."""

import jax
import jax.numpy as jnp
import numpy as np

from memcalib_jax.models.config import ModelConfig


def random_params(config: ModelConfig, *, scale: float = 0.4, seed: int = 0) -> dict:
    """Returns float32 parameters, normal with standard deviation `scale`."""
    random = np.random.RandomState(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(random.standard_normal(shape) * scale, jnp.float32),
        config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple))
