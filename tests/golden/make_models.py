"""Makes the golden values of tests/models with the transformers library (needs torch).

    PYTHONPATH=. python tests/golden/make_models.py

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
}
GRADIENTS = (
    "embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.bias",
    "layers.0.self_attn.q_norm.weight", "layers.1.self_attn.k_proj.weight",
    "layers.1.input_layernorm.weight", "model.norm.weight")


def make_config(name, hidden_size, rope_theta=10000.0, **settings):
    family = name.split("_")[0]
    settings.setdefault("tie_word_embeddings", name.endswith("_tied"))
    return transformers.AutoConfig.for_model(
        family, vocab_size=59, intermediate_size=56, num_hidden_layers=2, hidden_size=hidden_size,
        max_position_embeddings=256, eos_token_id=[3, 7],
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta}, **settings)


def make_case(name, seed):
    config = make_config(name, **CONFIGS[name])
    shapes = {key: list(value.shape) for key, value in
              transformers.AutoModelForCausalLM.from_config(config).state_dict().items()
              if not (config.tie_word_embeddings and key == "lm_head.weight")}
    model = torch_models.from_tensors(config, tiny_models.random_tensors(shapes, seed))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config_json = (Path(folder) / "config.json").read_text()
    tokens, lengths = tiny_models.random_rows(config.vocab_size, seed + 1)
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
        make_case(case, 100 * number)
    make_smollm2()
