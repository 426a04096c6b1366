"""Small random models of every family against the transformers library: stored and live."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from memcalib_jax import models


def relative_error(ours, theirs):
    return np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs))


def assert_matches(params, config, tokens, lengths, logits, gradients):
    if gradients:
        ours, our_gradients = tiny_models.logits_and_gradients(params, config, tokens, lengths)
        stored = tiny_models.stored_tensors(our_gradients, config)
    else:
        ours = models.logits(params, config, tokens, lengths)
    valid = np.arange(tokens.shape[1]) < lengths[:, None]
    assert relative_error(ours[valid], logits[valid]) < 1e-4
    for name, values in gradients.items():
        assert relative_error(stored[name], values) < 1e-3, name


@pytest.mark.parametrize("case", tiny_models.CASES)
def test_stored_values(case, tmp_path):
    golden = tiny_models.golden(case)
    folder = tiny_models.write_folder(
        tmp_path, golden["config"], tiny_models.random_tensors(golden["shapes"], golden["seed"]))
    params, config = models.load(folder)
    gradients = {key.removeprefix("gradient "): values for key, values in golden.items()
                 if key.startswith("gradient ")}
    assert (len(gradients) >= 5) == (case in tiny_models.WITH_GRADIENTS)
    assert_matches(params, config, golden["tokens"], golden["lengths"], golden["logits"],
                   gradients)


@pytest.mark.parametrize("case", tiny_models.CASES)
def test_live_transformers(case, tmp_path):
    pytest.importorskip("torch")
    import torch_models
    import transformers

    golden = tiny_models.golden(case)
    reference = torch_models.from_tensors(
        transformers.AutoConfig.for_model(**golden["config"]),
        tiny_models.random_tensors(golden["shapes"], seed=7))
    reference.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    params, config = models.load(tmp_path)
    tokens, lengths = tiny_models.random_rows(
        config.vocab_size, seed=8, lengths=(1, *tiny_models.row_lengths(case)))
    logits, total = torch_models.run(reference, tokens, lengths)
    total.backward()
    assert_matches(params, config, tokens, lengths, logits.detach().numpy(), {
        name: value.grad.numpy() for name, value in reference.named_parameters()
        if case in tiny_models.WITH_GRADIENTS})


# Frequencies there are float32 powers; queries that grow with the position make more of that.
@pytest.mark.parametrize("case, far", [
    ("qwen3_tied", 30000), ("llama_scaled", 30000), ("ministral3_untied", 5000)])
def test_far_positions_match_transformers(case, far, tmp_path):
    torch = pytest.importorskip("torch")
    import torch_models
    import transformers

    from memcalib_jax.models.layers import contract, head_matrix
    from memcalib_jax.models.packed import hidden_states, plain_rows

    golden = tiny_models.golden(case)
    tensors = tiny_models.random_tensors(golden["shapes"], seed=7)
    reference = torch_models.from_tensors(
        transformers.AutoConfig.for_model(**golden["config"]), tensors)
    params, config = models.load(tiny_models.write_folder(tmp_path, golden["config"], tensors))
    tokens, lengths = tiny_models.random_rows(config.vocab_size, seed=9, lengths=(16,))
    # A gap between two stretches makes their relative distance large too.
    positions = np.concatenate([np.arange(8), far + np.arange(8)])[None].astype(np.int32)
    packed = plain_rows(jnp.asarray(tokens), jnp.asarray(lengths)).replace(
        positions=jnp.asarray(positions))
    ours = contract("...d,vd->...v", hidden_states(params, config, packed), head_matrix(params))
    with torch.no_grad():
        theirs = reference(torch.tensor(tokens).long(), use_cache=False,
                           position_ids=torch.tensor(positions).long(),
                           attention_mask=torch.ones(1, 1, 16, 16).tril().log()).logits.numpy()
    assert relative_error(ours, theirs) < 1e-3


PIXTRAL = dict(model_type="pixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1,
               num_attention_heads=2, head_dim=8, image_size=28, patch_size=14)
QWEN_VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4,
                   num_position_embeddings=16)


@pytest.mark.parametrize("case, name, vision", [
    ("ministral3_untied", "Mistral3", PIXTRAL),
    ("qwen3_5_tied", "Qwen3_5", QWEN_VISION | dict(out_hidden_size=24)),
    ("qwen3_5_moe_untied", "Qwen3_5Moe", QWEN_VISION | dict(out_hidden_size=24))])
def test_text_part_of_a_live_model_of_images_and_text(case, name, vision, tmp_path):
    """Saved by transformers under its own tensor names, vision tower included."""
    torch = pytest.importorskip("torch")
    import transformers

    golden = tiny_models.golden(case)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        text_config=golden["config"], vision_config=vision,
        tie_word_embeddings=case.endswith("_tied"))
    reference = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    reference.save_pretrained(tmp_path)
    assert any("vis" in key for key in reference.state_dict())
    params, config = models.load(tmp_path)
    tokens, lengths = tiny_models.random_rows(config.vocab_size, seed=8, lengths=(9,))
    with torch.no_grad():
        theirs = reference(torch.tensor(tokens).long()).logits.numpy()
    assert relative_error(models.logits(params, config, tokens, lengths), theirs) < 1e-4
