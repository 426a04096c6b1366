import hybrid_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_params

from memcalib_jax.models import ModelConfig
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.scoring.counterfactual import score_batch
from memcalib_jax.scoring.packing import pack
from memcalib_jax.scoring.prefix_tree import build_tree
from memcalib_jax.training.state import OptimizerConfig, init_state, matrices_in
from memcalib_jax.training.update import ObjectiveConfig, PolicyBatch, gradient_sums, update

CONFIG = ModelConfig("llama", 53, 16, 24, 2, 4, 2, 8)
OBJECTIVE = ObjectiveConfig(compute_dtype="float32", kl_weight=0.1)


PARAMS = random_params(CONFIG, scale=0.3)
OTHER = random_params(CONFIG, scale=0.3, seed=1)


def make_batches(bin_tokens, *, invalid=(), num_bins=1, grouped=True, repeats=False):
    """Three prompts with four ragged responses each; `invalid` lists (prompt, response).

    With `repeats` the first two responses of each group are equal; their advantages are not.
    """
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 53, n) for n in (9, 14, 11)]
    responses = [[rng.integers(0, 53, n) for n in rng.integers(1, 12, 4)] for _ in prompts]
    if repeats:
        responses = [[row[0], row[0], *row[2:]] for row in responses]
    advantages = [[rng.normal(size=len(r)).astype(np.float32) for r in row] for row in responses]
    where = [(p, g) for p in range(3) for g in range(4)]
    if grouped:
        trees = [build_tree([prompt], row, [(0, g) for g in range(4)], keep_repeats=True)
                 for prompt, row in zip(prompts, responses)]
        rows = advantages
        valid = [[(p, g) not in invalid for g in range(4)] for p in range(3)]
    else:  # every response with a prompt of its own
        trees = [build_tree([prompts[p]], [responses[p][g]], [(0, 0)]) for p, g in where]
        rows = [[advantages[p][g]] for p, g in where]
        valid = [[(p, g) not in invalid] for p, g in where]
    packing = pack(trees, bin_sizes(bin_tokens), num_bins=num_bins)
    old = [score_batch(PARAMS, CONFIG, batch, 1.0)[0] for batch in packing.batches]
    reference = [score_batch(OTHER, CONFIG, batch, 1.0)[0] for batch in packing.batches]
    masks = [[np.full(len(row), ok) for row, ok in zip(group, oks)]
             for group, oks in zip(rows, valid)]
    return [PolicyBatch(*parts) for parts in zip(
        packing.batches, old, reference, packing.batched(rows), packing.batched(masks, bool))]


def assert_close(first, second, tolerance=2e-6):
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(second))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * scale)


@pytest.mark.parametrize("bin_tokens, num_bins, grouped", [
    (20, 1, True), (45, 1, True), (45, 3, True), (30, 1, False), (8192, 1, False)])
def test_any_split_gives_the_same_gradient(bin_tokens, num_bins, grouped):
    whole, sums = gradient_sums(PARAMS, CONFIG, make_batches(8192), OBJECTIVE)
    batches = make_batches(bin_tokens, num_bins=num_bins, grouped=grouped)
    parts, part_sums = gradient_sums(PARAMS, CONFIG, batches, OBJECTIVE)
    assert_close(parts, whole)
    np.testing.assert_allclose(part_sums.loss, sums.loss, rtol=1e-5)
    assert float(part_sums.tokens) == float(sums.tokens)


def test_equal_responses_each_have_their_own_advantage():
    grouped, sums = gradient_sums(PARAMS, CONFIG, make_batches(8192, repeats=True), OBJECTIVE)
    alone, alone_sums = gradient_sums(
        PARAMS, CONFIG, make_batches(8192, repeats=True, grouped=False), OBJECTIVE)
    assert_close(grouped, alone)
    assert float(sums.tokens) == float(alone_sums.tokens)
    np.testing.assert_allclose(sums.loss, alone_sums.loss, rtol=1e-5)


def test_invalid_responses_leave_sum_and_count():
    everything, sums = gradient_sums(PARAMS, CONFIG, make_batches(8192), OBJECTIVE)
    invalid = [(0, 1), (2, 3)]
    some, some_sums = gradient_sums(
        PARAMS, CONFIG, make_batches(8192, invalid=invalid), OBJECTIVE)
    others = [(p, g) for p in range(3) for g in range(4) if (p, g) not in invalid]
    rest, rest_sums = gradient_sums(
        PARAMS, CONFIG, make_batches(8192, invalid=others), OBJECTIVE)
    assert float(some_sums.tokens) + float(rest_sums.tokens) == float(sums.tokens)
    assert 0 < float(rest_sums.tokens) < float(sums.tokens)
    assert_close(jax.tree.map(jnp.add, some, rest), everything)


def test_first_ratio_is_one():
    _, sums = gradient_sums(PARAMS, CONFIG, make_batches(45), OBJECTIVE)
    assert float(sums.max_ratio_error) <= 1e-6
    assert float(sums.clipped) == 0


def test_gradient_reaches_the_tied_embedding_through_the_head():
    gradient, _ = gradient_sums(PARAMS, CONFIG, make_batches(8192), OBJECTIVE)
    used = {int(t) for batch in make_batches(8192)
            for t in np.asarray(batch.scored.packed.tokens).ravel()}
    never_read = [i for i in range(53) if i not in used]
    assert never_read and np.abs(np.asarray(gradient["embed"])[never_read]).min(-1).all()


def test_update_equals_adamw_by_hand():
    optimizer = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.05)
    batches = make_batches(45)
    gradient, sums = gradient_sums(PARAMS, CONFIG, batches, OBJECTIVE)
    gradient = jax.tree.map(lambda g: np.asarray(g, np.float64) / float(sums.tokens), gradient)
    norm = np.sqrt(sum((g ** 2).sum() for g in jax.tree.leaves(gradient)))
    assert norm > 0.05
    state, metrics = update(init_state(PARAMS, optimizer), CONFIG, batches, OBJECTIVE, optimizer)
    np.testing.assert_allclose(metrics["loss/grad_norm"], norm, rtol=1e-5)
    for before, after, g in zip(*map(jax.tree.leaves, (PARAMS, state.params, gradient))):
        g = g * 0.05 / norm
        first, second = 0.1 * g / (1 - 0.9), np.sqrt(0.001 * g ** 2 / (1 - 0.999))
        before = np.asarray(before, np.float64)
        expected = before - 1e-2 * (first / (second + 1e-8) + 0.01 * before)
        clear = np.abs(g) > 1e-6  # the sign of a vanishing gradient is noise
        np.testing.assert_allclose(np.asarray(after)[clear], expected[clear], atol=2e-5)


def test_a_mini_batch_without_valid_tokens_changes_nothing():
    optimizer = OptimizerConfig(learning_rate=1e-2)
    everyone = [(p, g) for p in range(3) for g in range(4)]
    state, metrics = update(init_state(PARAMS, optimizer), CONFIG,
                            make_batches(8192, invalid=everyone), OBJECTIVE, optimizer)
    for before, after in zip(*map(jax.tree.leaves, (PARAMS, state.params))):
        np.testing.assert_array_equal(before, after)
    assert metrics["loss/grad_norm"] == 0.0


def test_the_start_survives_updates():
    # The reference shares its memory with nothing that an update reuses.
    optimizer = OptimizerConfig(learning_rate=1e-2)
    copies = jax.tree.map(np.array, PARAMS)
    update(init_state(PARAMS, optimizer), CONFIG, make_batches(8192), OBJECTIVE, optimizer)
    for before, after in zip(*map(jax.tree.leaves, (copies, PARAMS))):
        np.testing.assert_array_equal(before, after)


def test_matrices_take_the_dtype_and_norms_stay():
    cast = matrices_in(PARAMS, "bfloat16")
    assert cast["embed"].dtype == cast["layers"]["q"].dtype == jnp.bfloat16
    assert cast["final_norm"].dtype == cast["layers"]["mlp_norm"].dtype == jnp.float32


def test_what_sets_the_decay_of_memories_stays_float32():
    cast = matrices_in(hybrid_models.random_params(hybrid_models.CONFIG), "bfloat16")
    layers = cast["delta_layers"]
    assert layers["log_rate"].dtype == layers["decay_bias"].dtype == jnp.float32
    assert layers["decay"].dtype == layers["conv"].dtype == jnp.bfloat16


def test_a_diverged_step_is_refused_before_it_can_be_saved():
    optimizer = OptimizerConfig(learning_rate=1e-2)
    broken = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), PARAMS)
    with pytest.raises(FloatingPointError, match="learning rate"):
        update(init_state(broken, optimizer), CONFIG, make_batches(8192), OBJECTIVE, optimizer)
