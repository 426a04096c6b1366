"""SmolLM2-135M-Instruct out of its GGUF file: the numbers of transformers, and real answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from memcalib_jax import models

TEXTS = (
    "Memory is useful only where it applies: a model that repeats every fact it was given is no "
    "better than one that forgets them all.",
    "def area(radius):\n    return 3.14159 * radius ** 2\n\nprint(area(2))  # about 12.6\n",
)


def token_log_probs(params, config, tokens):
    values = models.logits(params, config, jnp.asarray([tokens]), jnp.array([len(tokens)]))
    log_probs = jax.nn.log_softmax(values[0, :-1])
    return np.asarray(log_probs[np.arange(len(tokens) - 1), np.asarray(tokens[1:])])


def assert_close(ours, theirs):
    error = np.abs(ours - theirs)
    assert error.max() < 1e-4
    assert error.mean() < 1e-5


def test_config(smollm2):
    config = smollm2[1]
    assert (config.family, config.vocab_size, config.hidden_size, config.intermediate_size,
            config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (
                "llama", 49152, 576, 1536, 30, 9, 3, 64)
    assert config.tie_embeddings and not config.attention_bias and not config.qk_norm
    assert config.rope.theta == 100000.0
    assert config.norm_eps == pytest.approx(1e-5)
    assert config.max_positions == 8192
    assert config.eos_ids == (2,)


def test_parameters(smollm2):
    params, config, _ = smollm2
    assert jax.tree.map(jnp.shape, params) == config.parameter_shapes()
    assert sum(x.size for x in jax.tree.leaves(params)) == 134_515_008
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def test_stored_log_probs(smollm2):
    params, config, tokenizer = smollm2
    golden = tiny_models.golden("smollm2")
    assert tokenizer(golden["text"])["input_ids"] == golden["tokens"].tolist()
    ours = token_log_probs(params, config, golden["tokens"].tolist())
    assert_close(ours, golden["log_probs"])
    assert ours.mean() > -5  # Without its real head a model is near -log(49152) = -10.8.


def test_live_transformers(smollm2):
    torch = pytest.importorskip("torch")
    import torch_models

    params, config, tokenizer = smollm2
    reference = torch_models.from_gguf(models.default_model_path(), "llama", num_layers=30)
    for text in TEXTS:
        tokens = tokenizer(text)["input_ids"]
        with torch.no_grad():
            values, _ = torch_models.run(reference, np.array([tokens]), np.array([len(tokens)]))
        theirs = torch.log_softmax(values[0, :-1].double(), dim=-1).numpy()
        assert_close(token_log_probs(params, config, tokens),
                     theirs[np.arange(len(tokens) - 1), tokens[1:]])


def test_greedy_answer_knows_paris(smollm2):
    params, config, tokenizer = smollm2
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_dict=False)
    tokens, size = list(prompt), len(prompt) + 16
    while len(tokens) < size and tokens[-1] not in config.eos_ids or len(tokens) == len(prompt):
        padded = jnp.asarray([tokens + [0] * (size - len(tokens))])
        values = models.logits(params, config, padded, jnp.array([len(tokens)]))
        tokens.append(int(values[0, len(tokens) - 1].argmax()))
    assert tokens[-1] in config.eos_ids
    assert "Paris" in tokenizer.decode(tokens[len(prompt):])


def test_pad_that_is_eos_is_no_mask(smollm2):
    """Its pad token is its eos token: padding with it or with another id changes nothing."""
    params, config, tokenizer = smollm2
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    tokens = tokenizer("A.<|im_end|>\nB.<|im_end|>\n")["input_ids"]
    assert tokens.count(2) == 2
    lengths = jnp.array([len(tokens)])
    with_eos = models.logits(params, config, jnp.asarray([tokens + [2] * 5]), lengths)
    with_other = models.logits(params, config, jnp.asarray([tokens + [9] * 5]), lengths)
    np.testing.assert_array_equal(with_eos[0, :len(tokens)], with_other[0, :len(tokens)])
