"""A small random model of delta net and attention layers that the hybrid tests share."""

import jax
import jax.numpy as jnp
import numpy as np

from memcalib_jax.models.config import DeltaNet, Experts, ModelConfig
from memcalib_jax.models.rope import Rope

CONFIG = ModelConfig(
    family="qwen3_5", vocab_size=61, hidden_size=16, intermediate_size=24, num_layers=6,
    num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(10000.0, partial_rotary_factor=0.5),
    qk_norm=True, attention_gate=True, zero_centred_norms=True, max_positions=512,
    delta=DeltaNet(("delta", "delta", "attention"), num_key_heads=2, num_value_heads=4, key_dim=6,
                   value_dim=5, conv_size=4))
EXPERTS = Experts(count=4, per_token=2, shared_size=12)


def random_params(config: ModelConfig, seed: int = 0) -> dict:
    """Returns float32 parameters that make every layer matter and forget over tens of tokens."""
    random = np.random.RandomState(seed)

    def leaf(path, shape):
        values = random.standard_normal(shape) * 0.2
        if path[-1].key == "decay_bias":
            values -= 3.0
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(
        leaf, config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple))
