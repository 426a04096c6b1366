"""Makes the golden values of tests/models with the transformers library (needs torch).

    PYTHONPATH=. python tests/golden/make_models.py [CASE ...]

Writes, per small model, its config.json, tensor shapes and seed, tokens, logits and a few
gradients; and the log-probs of one text under SmolLM2-135M-Instruct, read by transformers.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "models"))
import tiny_models  # noqa: E402
import torch_models  # noqa: E402

from memcalib_jax import models  # noqa: E402

TEXT = ("The ship left the harbour at dawn. By noon the coast was only a thin grey line, and the "
        "captain, who had slept badly, asked for coffee.")
CONFIGS = {
    "llama_tied": dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=2),
    "llama_untied": dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=4,
                         rope_theta=500000.0),
    "llama_wide_heads": dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=1,
                             head_dim=20, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "qwen2_tied": dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2),
    "qwen2_untied": dict(hidden_size=42, num_attention_heads=7, num_key_value_heads=1,
                         rope_theta=1000000.0),
    "qwen3_tied": dict(hidden_size=40, num_attention_heads=5, num_key_value_heads=1, head_dim=16),
    "qwen3_untied": dict(hidden_size=32, num_attention_heads=6, num_key_value_heads=3,
                         head_dim=10, rope_theta=1000000.0),
    # Contexts of a few tokens at first, so that short rows reach what lies beyond them.
    "llama_scaled": dict(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
        rope_parameters={"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 16}),
    "llama_linear": dict(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5}),
    "qwen2_yarn": dict(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=1,
        rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
                         "original_max_position_embeddings": 6, "beta_fast": 2.0}),
    "ministral3_tied": dict(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
        rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 16.0,
                         "original_max_position_embeddings": 3, "beta_fast": 4.0, "beta_slow": 0.1,
                         "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}),
    "ministral3_untied": dict(
        hidden_size=36, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0,
                         "original_max_position_embeddings": 4, "beta_fast": 1.0, "beta_slow": 0.02,
                         "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False,
                         "llama_4_scaling_beta": 0.5}),
    "qwen3_moe_tied": dict(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=1, head_dim=10,
        num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=False),
    "qwen3_moe_untied": dict(
        hidden_size=24, num_attention_heads=3, num_key_value_heads=3, head_dim=12,
        rope_theta=1000000.0, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20,
        norm_topk_prob=True),
    "qwen3_5_tied": dict(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
        linear_value_head_dim=5, linear_conv_kernel_dim=3),
    "qwen3_5_untied": dict(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=24,
        num_hidden_layers=4, linear_num_key_heads=1, linear_num_value_heads=3,
        linear_key_head_dim=8, linear_value_head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000000.0,
                         "partial_rotary_factor": 0.25}),
    "qwen3_5_moe_untied": dict(
        hidden_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=4, num_experts=5, num_experts_per_tok=2,
        moe_intermediate_size=12, shared_expert_intermediate_size=20,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                         "partial_rotary_factor": 0.5}),
}
MODEL_TYPES = {"llama": "llama", "ministral3": "ministral3", "qwen2": "qwen2",
               "qwen3_moe": "qwen3_moe", "qwen3_5_moe": "qwen3_5_moe_text",
               "qwen3_5": "qwen3_5_text", "qwen3": "qwen3"}
GRADIENTS = (
    "embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.bias",
    "layers.0.self_attn.q_norm.weight", "layers.1.self_attn.k_proj.weight",
    "layers.1.input_layernorm.weight", "model.norm.weight", "layers.0.mlp.gate.weight",
    "layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj",
    "layers.1.self_attn.q_proj.weight", "layers.0.linear_attn.in_proj_qkv.weight",
    "layers.0.linear_attn.conv1d.weight", "layers.0.linear_attn.dt_bias",
    "layers.0.linear_attn.A_log", "layers.2.linear_attn.norm.weight")


def make_config(name, hidden_size, rope_theta=10000.0, **settings):
    family = next(family for family in MODEL_TYPES if name.startswith(family))
    settings.setdefault("num_hidden_layers", 2)
    settings.setdefault("tie_word_embeddings", name.endswith("_tied"))
    settings.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": rope_theta})
    return transformers.AutoConfig.for_model(
        MODEL_TYPES[family], vocab_size=59, intermediate_size=56, hidden_size=hidden_size,
        max_position_embeddings=256, eos_token_id=[3, 7], **settings)


def make_case(name, seed):
    config = make_config(name, **CONFIGS[name])
    shapes = {key: list(value.shape) for key, value in
              transformers.AutoModelForCausalLM.from_config(config).state_dict().items()
              if not (config.tie_word_embeddings and key == "lm_head.weight")}
    model = torch_models.from_tensors(config, tiny_models.random_tensors(shapes, seed))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config_json = (Path(folder) / "config.json").read_text()
    tokens, lengths = tiny_models.random_rows(
        config.vocab_size, seed + 1, tiny_models.row_lengths(name))
    logits, total = torch_models.run(model, tokens, lengths)
    total.backward()
    gradients = {f"gradient {key}": value.grad.numpy() for key, value in model.named_parameters()
                 if name in tiny_models.WITH_GRADIENTS and key.endswith(GRADIENTS)}
    np.savez_compressed(
        HERE / f"{name}.npz", config=config_json, shapes=json.dumps(shapes), seed=seed,
        tokens=tokens, lengths=lengths, logits=logits.detach().numpy(), **gradients)


def make_smollm2():
    path = models.default_model_path()
    tokens = np.array(models.load_tokenizer(path)(TEXT)["input_ids"], np.int32)
    with torch.no_grad():
        model = torch_models.from_gguf(path, "llama", num_layers=30)
        logits, _ = torch_models.run(model, tokens[None], np.array([len(tokens)]))
    log_probs = torch.log_softmax(logits[0, :-1].double(), dim=-1).numpy()
    np.savez_compressed(HERE / "smollm2.npz", text=json.dumps(TEXT), tokens=tokens,
                        log_probs=log_probs[np.arange(len(tokens) - 1), tokens[1:]])


if __name__ == "__main__":
    for number, case in enumerate(tiny_models.CASES):
        if len(sys.argv) == 1 or case in sys.argv[1:]:
            make_case(case, 100 * number)
    if len(sys.argv) == 1 or "smollm2" in sys.argv[1:]:
        make_smollm2()
