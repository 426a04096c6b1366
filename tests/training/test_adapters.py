"""Training an adapter: what moves, what stays, and that it is the same training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax.models import ModelConfig
from memcalib_jax.models.lora import LoraConfig, adapter_shapes, merge
from memcalib_jax.scoring.counterfactual import score_batch
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.scoring.packing import pack
from memcalib_jax.scoring.prefix_tree import build_tree
from memcalib_jax.training.checkpoint import Checkpoints
from memcalib_jax.training.state import Frozen, OptimizerConfig, init_state, matrices_in, split
from memcalib_jax.training.update import ObjectiveConfig, PolicyBatch, gradient_sums, update

CONFIG = ModelConfig("llama", 37, 16, 24, 2, 4, 2, 8)
LORA = LoraConfig(rank=2, alpha=5.0, targets=("q", "o", "up"))
OBJECTIVE = ObjectiveConfig(compute_dtype="float32", kl_weight=0.1)


def random_tree(shapes, seed, scale=0.3):
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    rng = np.random.default_rng(seed)
    return tree.unflatten([jnp.asarray(rng.normal(size=s) * scale, jnp.float32) for s in leaves])


BASE = random_tree(CONFIG.parameter_shapes(), 0)


def make_batches(params):
    """Two prompts with three responses each; old log-probs of `params`, the base's as reference."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 37, n) for n in (7, 9)]
    responses = [[rng.integers(0, 37, n) for n in (4, 6, 3)] for _ in prompts]
    packing = pack([build_tree([prompt], row, [(0, g) for g in range(3)])
                    for prompt, row in zip(prompts, responses)], bin_sizes(64))
    advantages = [[rng.normal(size=len(r)).astype(np.float32) for r in row] for row in responses]
    masks = [[np.full(len(r), True) for r in row] for row in responses]
    old, reference = ([score_batch(tree, CONFIG, batch, 1.0)[0] for batch in packing.batches]
                      for tree in (params, BASE))
    return [PolicyBatch(*parts) for parts in zip(
        packing.batches, old, reference, packing.batched(advantages),
        packing.batched(masks, bool))]


def test_gradient_is_that_of_the_merged_model_chained_by_hand():
    adapter, frozen = random_tree(adapter_shapes(CONFIG, LORA), 1), Frozen(BASE, LORA)
    merged = merge(BASE, adapter, LORA)
    batches = make_batches(merged)
    ours, sums = gradient_sums(adapter, CONFIG, batches, OBJECTIVE, frozen)
    full, full_sums = gradient_sums(merged, CONFIG, batches, OBJECTIVE)
    np.testing.assert_allclose(sums.kl, full_sums.kl, rtol=1e-4)
    assert float(sums.kl) > 0.01
    for name in LORA.targets:
        a, b = (np.asarray(adapter["layers"][f"{name}_lora_{x}"], np.float64) for x in "ab")
        left, right = a.reshape(2, -1, 2), b.reshape(2, 2, -1)
        to_merged = np.asarray(full["layers"][name], np.float64).reshape(
            2, left.shape[1], right.shape[2])
        for letter, expected in (("a", 2.5 * to_merged @ right.swapaxes(1, 2)),
                                 ("b", 2.5 * left.swapaxes(1, 2) @ to_merged)):
            got = np.asarray(ours["layers"][f"{name}_lora_{letter}"])
            assert (np.abs(got - expected.reshape(got.shape)).max()
                    < 1e-4 * np.abs(expected).max())


@pytest.fixture(scope="module")
def first_update():
    """A new adapter before and after an update: states, metrics, and what is frozen."""
    optimizer = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9)
    trained, frozen = split(BASE, CONFIG, LORA, jax.random.key(0))
    before = jax.device_get(init_state(trained, optimizer))
    batches = make_batches(frozen.combine(trained))
    state, metrics = update(init_state(trained, optimizer), CONFIG, batches, OBJECTIVE, optimizer,
                            frozen)
    return before, jax.device_get(state), metrics, frozen


def test_a_new_adapter_starts_at_the_reference(first_update):
    _, _, metrics, _ = first_update
    assert metrics["loss/max_ratio_error"] <= 1e-6
    assert abs(metrics["loss/kl"]) < 1e-10
    assert metrics["loss/grad_norm"] > 0


def test_an_update_moves_b_and_only_decays_a(first_update):
    # dL/dA = s dL/dW B^T is 0 where B is.
    before, after, _, _ = first_update
    for name, start in before.params["layers"].items():
        end = after.params["layers"][name]
        if name.endswith("_a"):
            np.testing.assert_allclose(end, start * (1 - 1e-2 * 0.01), rtol=1e-6)
        else:
            np.testing.assert_allclose(np.abs(end), 1e-2, rtol=1e-2)  # Adam's first step


def test_the_base_stays_and_has_no_moments(first_update):
    before, after, _, frozen = first_update
    expected = random_tree(CONFIG.parameter_shapes(), 0)
    jax.tree.map(np.testing.assert_array_equal, frozen.params, expected)
    adapter = {x.shape for x in jax.tree.leaves(before.params)}
    assert {x.shape for x in jax.tree.leaves(after.opt_state) if x.ndim} == adapter


def test_a_frozen_base_is_not_copied_into_the_policy():
    # The policy, the reference and the frozen base are the same arrays.
    start = matrices_in(BASE, "bfloat16")
    trained, frozen = split(start, CONFIG, LORA, jax.random.key(0))
    policy = matrices_in(frozen.combine(trained), "bfloat16")
    reference = matrices_in(start, "bfloat16")
    for name, value in start["layers"].items():
        assert policy["layers"][name] is value and reference["layers"][name] is value
    assert policy["layers"]["q_lora_b"].dtype == jnp.bfloat16


def test_without_an_adapter_everything_is_trained():
    trained, frozen = split(BASE, CONFIG, None, jax.random.key(0))
    assert trained is BASE and not jax.tree.leaves(frozen)
    assert frozen.combine(trained) is BASE


def test_a_checkpoint_holds_the_adapter_alone(first_update, tmp_path):
    _, state, _, _ = first_update
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {"at": 3})
    assert checkpoints.param_shapes(1) == adapter_shapes(CONFIG, LORA)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    restored, data = checkpoints.restore(1, like)
    assert data == {"at": 3}
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    checkpoints.close()
