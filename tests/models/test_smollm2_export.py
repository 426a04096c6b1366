"""SmolLM2-135M-Instruct from its GGUF file to a folder that transformers loads."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax import models

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def exported(smollm2, tmp_path_factory):
    params, config, _ = smollm2
    folder = tmp_path_factory.mktemp("smollm2") / "out"
    models.save(folder, params, config, source=models.default_model_path(),
                max_shard_bytes=200_000_000)
    return folder


def test_bits_and_config_survive(smollm2, exported):
    params, config, _ = smollm2
    again, config_again = models.load(exported)
    assert config_again == config
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert len(list(exported.glob("model-*.safetensors"))) == 3


def test_config_json(exported):
    settings = json.loads((exported / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert settings["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert (settings["dtype"], settings["tie_word_embeddings"]) == ("float32", True)
    assert settings["eos_token_id"] == [2]


def test_tokenizer_survives(smollm2, exported):
    ours, theirs = smollm2[2], models.load_tokenizer(exported)
    text = "Caffè at 12:30,\n\tdon't  panic <|im_end|> ok"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.chat_template == theirs.chat_template and ours.eos_token == theirs.eos_token
    assert len(ours) == len(theirs)


def test_transformers_answers_the_same(smollm2, exported):
    """Every greedy token of transformers is our most likely one, and all logits agree."""
    torch = pytest.importorskip("torch")
    import transformers

    torch.set_num_threads(1)
    params, config, tokenizer = smollm2
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        exported, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    prompt = theirs.apply_chat_template(
        QUESTION, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert prompt == tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, tokenize=True, return_dict=False)
    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt]), do_sample=False,
                                max_new_tokens=NEW_TOKENS)[0]
        their_logits = model(tokens[None]).logits[0].numpy()
    tokens = tokens.numpy().astype(np.int32)
    answer = theirs.decode(tokens[len(prompt):], skip_special_tokens=True)
    assert "Paris" in answer
    ours = np.asarray(models.logits(params, config, jnp.asarray(tokens[None]),
                                    jnp.array([len(tokens)]))[0])
    np.testing.assert_array_equal(ours[len(prompt) - 1:-1].argmax(-1), tokens[len(prompt):])
    assert np.abs(ours - their_logits).max() < 1e-4 * np.abs(their_logits).max()
