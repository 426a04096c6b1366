"""What a step keeps on a device, worked out by hand."""

import jax
from jax.sharding import AbstractMesh

from memcalib_jax.models import ModelConfig, parameter_axes
from memcalib_jax.models.config import Experts
from memcalib_jax.models.lora import LoraConfig, adapter_shapes
from memcalib_jax.parallel import shardings
from memcalib_jax.training.memory import memory_table, step_memory
from memcalib_jax.training.rollouts import SamplingConfig

CONFIG = ModelConfig("llama", vocab_size=10, hidden_size=8, intermediate_size=16, num_layers=2,
                     num_heads=2, num_kv_heads=1, head_dim=4, tie_embeddings=True)
# Embedding and last norm; two layers of q and o, k and v, three of the MLP and two norms.
PARAMETERS = 80 + 8 + 2 * (2 * 64 + 2 * 32 + 3 * 128 + 16)


def on_device(shapes):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda _: device, shapes, is_leaf=lambda x: isinstance(x, tuple))


def kept(layout=None, **more):
    return step_memory(
        CONFIG, layout or on_device(CONFIG.parameter_shapes()), "bfloat16",
        sampling=SamplingConfig(num_samples=4, max_tokens=5), num_prompts=3, prompt_tokens=7,
        bin_tokens=100, **more)


def test_every_part_by_hand():
    assert kept() == {
        "master weights": 4 * PARAMETERS, "optimizer moments": 8 * PARAMETERS,
        "gradients": 4 * PARAMETERS, "reference": 2 * PARAMETERS,
        "weights of products": 2 * PARAMETERS,
        "decoding cache": 2 * 2 * 2 * 1 * 4 * 3 * (7 + 4 * 5),
        "residual stream": 4 * 2 * 8 * 100}


def test_an_adapter_needs_no_second_model():
    lora = LoraConfig(2, 4.0, ("q_proj",))
    adapter = 2 * (8 * 2 + 2 * 8)
    found = kept(lora=lora, lora_layout=on_device(adapter_shapes(CONFIG, lora)))
    assert found["master weights"] == 4 * adapter and found["gradients"] == 4 * adapter
    assert found["frozen base"] == 2 * PARAMETERS
    assert "reference" not in found and "weights of products" not in found


def test_on_a_mesh_decoding_has_weights_of_its_own():
    mesh = AbstractMesh((1, 4, 1, 2), ("data", "fsdp", "expert", "tensor"))
    layout = shardings(parameter_axes(CONFIG), CONFIG.parameter_shapes(), mesh)
    found = kept(layout=layout, num_devices=8)
    # Over tensor: the vocabulary, q and o, the MLP; one key head and the norms lie whole.
    assert found["weights of decoding"] == 2 * (
        80 // 2 + 8 + 2 * (2 * 64 // 2 + 2 * 32 + 3 * 128 // 2 + 16))
    assert found["decoding cache"] == 2 * 2 * 2 * 1 * 4 * 3 * (7 + 4 * 5) // 8


def test_experts_stay_split_while_decoding():
    config = ModelConfig(
        "qwen3_moe", vocab_size=10, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=4, tie_embeddings=True, experts=Experts(4, 2))
    sizes = []
    for expert in (1, 4):
        mesh = AbstractMesh((1, 8 // expert, expert, 1), ("data", "fsdp", "expert", "tensor"))
        sizes.append(step_memory(
            config, shardings(parameter_axes(config), config.parameter_shapes(), mesh), "bfloat16",
            sampling=SamplingConfig(1, 1), num_prompts=1, prompt_tokens=1, bin_tokens=1,
            num_devices=8)["weights of decoding"])
    experts = 2 * 4 * 3 * 8 * 16
    assert sizes[0] - sizes[1] >= experts - experts // 4


def test_the_table_adds_up():
    text = memory_table({"gradients": 2**30, "reference": 2**29}, 2**31)
    assert text.splitlines()[1:] == ["  gradients                  1.00 GiB",
                                     "  reference                  0.50 GiB",
                                     "  in all                     1.50 GiB of 2.0 GiB"]
