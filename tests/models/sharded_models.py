"""Models loaded over eight CPU devices by the rules of `parallel`; run by test_sharded_experts."""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from memcalib_jax import models
from memcalib_jax.models.config import DeltaNet, Experts
from memcalib_jax.models.rope import Rope
from memcalib_jax.models.weights.families import flat_shapes
from memcalib_jax.parallel import batch_sharding, make_mesh, shardings
from memcalib_jax.sampling import sample

SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2,
             head_dim=8, tie_embeddings=False)
DENSE = models.ModelConfig("qwen2", num_layers=2, attention_bias=True, **SIZES)
MIXTURE = models.ModelConfig(
    "qwen3_5_moe", num_layers=4, qk_norm=True, attention_gate=True, zero_centred_norms=True,
    experts=Experts(4, 2, shared_size=8), rope=Rope(partial_rotary_factor=0.25),
    delta=DeltaNet(("delta", "attention"), 2, 4, 4, 4, conv_size=4), **SIZES)
# By hand: what lies where of the parameters that the rules treat differently.
CASES = [
    (DENSE, dict(fsdp=2, tensor=4),  # two key heads do not divide over four devices
     {"embed": ("tensor", "fsdp"), "layers/q": (None, "fsdp", "tensor", None),
      "layers/k": (None, "fsdp", None, None), "layers/k_bias": (None, None, None),
      "layers/down": (None, "tensor", "fsdp"), "layers/mlp_norm": (None, None)}),
    (MIXTURE, dict(fsdp=2, expert=2, tensor=2),
     {"layers/expert_up": (None, "expert", "fsdp", "tensor"),
      "layers/expert_down": (None, "expert", "tensor", "fsdp"),
      "delta_layers/qkv": (None, ("fsdp", "expert"), None),
      "delta_layers/o": (None, "tensor", None, ("fsdp", "expert"))}),
]


def write(folder, config):
    random = np.random.RandomState(0)
    flat = {path: (0.3 * random.standard_normal(shape)).astype(np.float32)
            for path, shape in flat_shapes(config).items()}
    models.save(folder, unflatten_dict(flat, sep="/"), config)


def sampled(params, config):
    rows = sample(params, config, [[1, 2, 3], [4, 5]], num_samples=3, max_tokens=4,
                  key=jax.random.key(0), stop_ids=())
    return [row.tokens for group in rows for row in group]


def main(folder):
    for config in (DENSE, MIXTURE):
        write(folder / config.family, config)
    random = np.random.RandomState(1)
    tokens, lengths = random.randint(0, 64, (8, 9)), np.array([9, 3, 5, 9, 1, 7, 8, 2])
    for config, sizes, expected in CASES:
        params, config = models.load(folder / config.family)
        alone = models.logits(params, config, tokens, lengths)
        alone_sampled = sampled(params, config)
        mesh = make_mesh(**sizes)
        params, _ = models.load(folder / config.family, shardings=shardings(
            models.parameter_axes(config), config.parameter_shapes(), mesh))
        flat = flatten_dict(params, sep="/")
        for path, spec in expected.items():
            assert flat[path].sharding.spec == PartitionSpec(*spec), (path, flat[path].sharding)
        with jax.set_mesh(mesh):
            rows = [jax.device_put(x, batch_sharding(mesh)) for x in (tokens, lengths)]
            ours = models.logits(params, config, *rows)
            assert len(ours.devices()) == 8
            assert sampled(params, config) == alone_sampled, config.family
        seen = np.arange(9) < lengths[:, None]
        alone = np.asarray(alone)[seen]
        np.testing.assert_allclose(np.asarray(ours)[seen], alone, rtol=0,
                                   atol=1e-5 * np.abs(alone).max())
    print("every model equals itself on one device")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
