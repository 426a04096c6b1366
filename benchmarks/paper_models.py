"""The papers' models in full size: their published config.json, as far as it gives the shape."""

# huggingface.co/Qwen/Qwen3-8B
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936}
# huggingface.co/Qwen/Qwen2.5-3B-Instruct
QWEN25_3B = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 11008, "max_position_embeddings": 32768, "max_window_layers": 70,
    "model_type": "qwen2", "num_attention_heads": 16, "num_hidden_layers": 36,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False,
    "vocab_size": 151936}
# huggingface.co/Qwen/Qwen2.5-7B-Instruct
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 152064}
# huggingface.co/mistralai/Ministral-3-8B-Instruct-2512-BF16, the text part
MINISTRAL3_8B = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    "text_config": {
        "model_type": "ministral3", "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 262144, "num_attention_heads": 32,
        "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"},
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 131072}}


# huggingface.co/Qwen/Qwen3.5-35B-A3B, the text part
QWEN35_35B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False, "text_config": {
        "model_type": "qwen3_5_moe_text", "attention_bias": False, "attn_output_gate": True,
        "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
        "layer_types": 10 * (3 * ["linear_attention"] + ["full_attention"]),
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1, "num_attention_heads": 16, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
        "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
        "vocab_size": 248320}}
