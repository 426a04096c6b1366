"""Qwen3.5 folders: the text model within a larger one, its settings, and what is refused."""

import jax
import numpy as np
import pytest
import tiny_models

from memcalib_jax import models
from memcalib_jax.models.config import DeltaNet, Experts
from memcalib_jax.models.rope import Rope
from memcalib_jax.models.weights.config_json import read_config, write_config

CASES = {"qwen3_5_tied": "Qwen3_5ForConditionalGeneration",
         "qwen3_5_moe_untied": "Qwen3_5MoeForConditionalGeneration"}
GOLDEN = {case: tiny_models.golden(case) for case in CASES}


def write(folder, case, *, wrapped=True, text=(), extra=(), **settings):
    """Writes a model, by default as the text part of one of images and text."""
    tensors = tiny_models.random_tensors(GOLDEN[case]["shapes"], seed=3)
    config = GOLDEN[case]["config"] | dict(text)
    if wrapped:
        config = {"architectures": [CASES[case]], "vision_config": {}, "text_config": config,
                  "tie_word_embeddings": case.endswith("_tied")}
        tensors = {name.replace("model.", "model.language_model.", 1): values
                   for name, values in tensors.items()}
    tensors |= {name: np.ones(3, np.float32) for name in extra}
    return tiny_models.write_folder(folder, config | settings, tensors)


def settings_of(case, without=(), **changes):
    settings = GOLDEN[case]["config"] | changes
    return {key: value for key, value in settings.items() if key not in without}


@pytest.mark.parametrize("case", CASES)
def test_vision_and_token_prediction_are_left_out(case, tmp_path):
    plain = models.load(write(tmp_path / "plain", case, wrapped=False,
                              extra=("mtp.layers.0.input_layernorm.weight",)))
    wrapped = models.load(write(tmp_path / "wrapped", case, extra=(
        "model.visual.patch_embed.proj.weight", "mtp.fc.weight")))
    assert wrapped[1] == plain[1]
    assert jax.tree.all(jax.tree.map(np.array_equal, wrapped[0], plain[0]))


def test_other_tensors_are_refused(tmp_path):
    folder = write(tmp_path, "qwen3_5_tied", extra=("model.audio.weight",))
    with pytest.raises(models.ModelError, match="left over: model.audio.weight"):
        models.load_config(folder)


@pytest.mark.parametrize("case", CASES)
def test_ties_may_be_stated_in_either_place(case, tmp_path):
    """Where the two places disagree, the head decides."""
    tied = case.endswith("_tied")
    for number, (root, text) in enumerate([(tied, not tied), (not tied, tied)]):
        folder = write(tmp_path / str(number), case, tie_word_embeddings=root,
                       text={"tie_word_embeddings": text})
        assert models.load_config(folder).tie_embeddings == tied


def test_config_fields(tmp_path):
    config = read_config(settings_of("qwen3_5_moe_untied"), tmp_path, eos_ids=[3])
    assert config == models.ModelConfig(
        family="qwen3_5_moe", vocab_size=59, hidden_size=24, intermediate_size=12, num_layers=4,
        num_heads=2, num_kv_heads=1, head_dim=8, rope=Rope(10000.0, 0.5), norm_eps=1e-6,
        qk_norm=True, attention_gate=True, zero_centred_norms=True,
        experts=Experts(5, 2, normalize=True, shared_size=20),
        delta=DeltaNet(("delta", "delta", "delta", "attention"), 2, 2, 8, 4, 4),
        tie_embeddings=False, max_positions=256, eos_ids=(3,))
    assert config.layer_kinds == ("delta", "delta", "delta", "attention")
    assert read_config(write_config(config), tmp_path, eos_ids=[3]) == config


def test_settings_that_checkpoints_leave_out(tmp_path):
    settings = settings_of("qwen3_5_tied", without=("layer_types", "head_dim"),
                           num_hidden_layers=8, rope_parameters={"rope_theta": 1e7})
    config = read_config(settings, tmp_path)
    assert config.head_dim == 256 and config.rope == Rope(1e7, 0.25)
    assert config.layer_pattern == ("delta", "delta", "delta", "attention")
    config = read_config(settings | {"full_attention_interval": 2}, tmp_path)
    assert config.layer_kinds == ("delta", "attention") * 4


FULL, LINEAR = "full_attention", "linear_attention"


@pytest.mark.parametrize("changes, expected", [
    ({"layer_types": [LINEAR, FULL, "sliding_attention", FULL]}, "sliding_attention"),
    ({"layer_types": [LINEAR, FULL]}, "for each of the 4 layers"),
    ({"layer_types": "full_attention"}, "list the kind of each layer"),
    ({"layer_types": [FULL] * 4}, "both delta and attention layers"),
    ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
    ({"attn_output_gate": False}, "attn_output_gate is False"),
    ({"linear_num_value_heads": 3}, "multiple of its key heads"),
    ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim"),
    ({"attention_bias": True}, "attention_bias"),
])
def test_what_the_forward_lacks_is_refused(changes, expected, tmp_path):
    with pytest.raises(models.ModelError, match=expected):
        read_config(settings_of("qwen3_5_tied", **changes), tmp_path)
