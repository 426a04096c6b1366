import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_params

from memcalib_jax.models import ModelConfig, logits
from memcalib_jax.scoring import ScoringGroup, score_counterfactuals, score_dense

CONFIG = ModelConfig("qwen3", 61, 32, 48, 3, 4, 2, 8, attention_bias=True, qk_norm=True,
                     tie_embeddings=False)


PARAMS = random_params(CONFIG, scale=0.3)


def random_group(seed, shift=0):
    rng = np.random.default_rng(seed)
    full = rng.integers(0, 61, rng.integers(20, 50)).tolist()
    cuts = rng.integers(0, len(full) - 4, 4)
    variants = [full[:cut] + full[cut + 4:] for cut in cuts]
    responses = [rng.integers(0, 61, n).tolist() for n in rng.integers(1, 17, 4)]
    pairs = [(v, g) for v in range(6) for g in range(4) if rng.random() < 0.7]
    return ScoringGroup([full, *variants, full], responses, pairs, [0] * 5 + [shift])


def dense(group, temperature=1.0):
    return score_dense(PARAMS, CONFIG, [group.prompts[p] for p, _ in group.pairs],
                       [group.responses[g] for _, g in group.pairs], temperature=temperature)


def full_softmax(prompt, response, temperature):
    """One row through the plain logits, in float64 from there on."""
    tokens = np.array([prompt + response])
    rows = np.asarray(logits(PARAMS, CONFIG, tokens, np.array([tokens.shape[1]])), np.float64)[0]
    rows = rows[len(prompt) - 1:-1] / temperature
    rows -= rows.max(-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    return rows[np.arange(len(response)), response]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_dense_equals_plain_logits(temperature):
    group = random_group(1)
    for (prompt, response), row in zip(group.pairs, dense(group, temperature)):
        expected = full_softmax(group.prompts[prompt], group.responses[response], temperature)
        np.testing.assert_allclose(row, expected, atol=5e-6)


@pytest.mark.parametrize("bin_tokens", [1, 90, 8192])
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_shared_equals_dense_however_it_is_packed(bin_tokens, temperature):
    groups = [random_group(seed, shift=7) for seed in range(3)]
    scored = score_counterfactuals(PARAMS, CONFIG, groups, temperature=temperature,
                                   bin_tokens=bin_tokens)
    for group, rows in zip(groups, scored, strict=True):
        for got, expected in zip(rows, dense(group, temperature), strict=True):
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, expected, atol=5e-6)


def test_batch_mates_and_order_do_not_matter():
    first, second = random_group(4), random_group(5)
    alone = score_counterfactuals(PARAMS, CONFIG, [first])[0]
    order = np.random.default_rng(0).permutation(len(first.pairs))
    shuffled = ScoringGroup(first.prompts, first.responses,
                            [first.pairs[i] for i in order], first.position_offsets)
    mixed = score_counterfactuals(PARAMS, CONFIG, [second, shuffled])[1]
    for place, i in enumerate(order):
        np.testing.assert_allclose(mixed[place], alone[i], atol=5e-6)


def test_a_pad_id_inside_a_prompt_is_a_token_like_any_other():
    # Rows are padded with id 0; a prompt full of zeros must not be taken for padding.
    row = score_dense(PARAMS, CONFIG, [[0, 0, 5, 0], [1] * 30], [[0, 3], [2] * 20])[0]
    np.testing.assert_allclose(row, full_softmax([0, 0, 5, 0], [0, 3], 1.0), atol=5e-6)


def test_bfloat16_products_keep_float32_sums():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    group = random_group(6)
    rows = score_counterfactuals(params, CONFIG, [group])[0]
    differences = np.concatenate(rows) - np.concatenate(dense(group))
    assert rows[0].dtype == np.float32
    assert 0 < np.sqrt(np.mean(differences ** 2)) < 0.2


def test_nothing_to_score():
    assert score_counterfactuals(PARAMS, CONFIG, []) == []
    assert score_counterfactuals(PARAMS, CONFIG, [ScoringGroup([[1]], [[2]], [])]) == [[]]
    assert score_dense(PARAMS, CONFIG, [], []) == []


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_bad_temperature(temperature):
    with pytest.raises(ValueError, match="temperature"):
        score_counterfactuals(PARAMS, CONFIG, [random_group(0)], temperature=temperature)
    with pytest.raises(ValueError, match="temperature"):
        score_dense(PARAMS, CONFIG, [[1]], [[2]], temperature=temperature)


@pytest.mark.parametrize("prompts, responses, message", [
    ([[1], [2]], [[1]], "2 prompts for 1 responses"),
    ([[1], []], [[1], [2]], "pair 1"),
    ([[1]], [[]], "pair 0"),
])
def test_bad_pairs(prompts, responses, message):
    with pytest.raises(ValueError, match=message):
        score_dense(PARAMS, CONFIG, prompts, responses)


def test_shared_equals_dense_on_smollm2(smollm2):
    params, config, tokenizer = smollm2
    full = tokenizer.encode("The user likes tea. The user has a red bike. The user lives in Oslo."
                            " Question: what should I drink in the morning?")
    without = tokenizer.encode("The user likes tea. The user lives in Oslo."
                               " Question: what should I drink in the morning?")
    responses = [tokenizer.encode(" A cup of tea would suit you."),
                 tokenizer.encode(" Ride your red bike to the cafe.")]
    pairs = [(p, g) for p in range(3) for g in range(2)]
    group = ScoringGroup([full, without, full], responses, pairs, [0, 0, 17])
    shared = score_counterfactuals(params, config, [group])[0]
    plain = score_dense(params, config, [group.prompts[p] for p, _ in pairs],
                        [responses[g] for _, g in pairs])
    for got, expected in zip(shared, plain, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)
    # The shifted twin is the same prompt to a rotary model; the ablated one is not.
    np.testing.assert_allclose(shared[4], shared[0], atol=1e-3)
    assert np.abs(shared[3] - shared[1]).max() > 0.1
