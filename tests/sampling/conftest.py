"""A small random model that the sampling tests share."""

import jax
import numpy as np
import pytest

from memcalib_jax.models import ModelConfig


@pytest.fixture(scope="session")
def small_model():
    """Returns `(params, config)`: two layers, four heads over two, 61 ids, uneven logits."""
    config = ModelConfig("qwen3", vocab_size=61, hidden_size=16, intermediate_size=24,
                         num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True,
                         max_positions=256)
    random = np.random.RandomState(5)

    def leaf(shape):
        return random.standard_normal(shape).astype(np.float32) * 0.4

    shapes = config.parameter_shapes()
    return jax.tree.map(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple)), config
