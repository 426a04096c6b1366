"""How evenly a mixture's routers spread tokens: counted in the forward, told by a step."""

import concurrent.futures
import dataclasses

import hybrid_models
import jax
import numpy as np
import pytest

from memcalib_jax.credit import CreditConfig
from memcalib_jax.data import load_records, sample_path
from memcalib_jax.judge import Judgment
from memcalib_jax.models import ModelConfig
from memcalib_jax.models.config import Experts
from memcalib_jax.models.packed import hidden_states, hidden_states_and_load, plain_rows
from memcalib_jax.training.metrics import router_metrics
from memcalib_jax.training.rollouts import Policy, Prompt, SamplingConfig
from memcalib_jax.training.state import OptimizerConfig, init_state
from memcalib_jax.training.step import StepConfig, train_step
from memcalib_jax.training.update import ObjectiveConfig

DENSE = ModelConfig("qwen3", 41, 16, 12, 2, 4, 2, 8, qk_norm=True)
MIXTURE = dataclasses.replace(DENSE, family="qwen3_moe", experts=Experts(4, 2))
HYBRID = dataclasses.replace(hybrid_models.CONFIG, family="qwen3_5_moe",
                             experts=hybrid_models.EXPERTS)


def test_figures_by_hand():
    """Loads 4 4 0 0 and 2 2 2 2 of four experts: log 2 and log 4 nats."""
    figures = router_metrics(np.array([[4, 4, 0, 0], [2, 2, 2, 2]]))
    assert figures == pytest.approx({
        "router/load_max": (2 + 1) / 2, "router/load_entropy": 1.5 * np.log(2),
        "router/unused": 2 / 8})


def test_all_tokens_at_one_expert():
    assert router_metrics(np.array([[0, 0, 7.0]])) == pytest.approx(
        {"router/load_max": 3.0, "router/load_entropy": 0.0, "router/unused": 2 / 3})


@pytest.mark.parametrize("config", [MIXTURE, HYBRID], ids=["mixture", "hybrid"])
def test_load_counts_the_tokens_of_segments(config):
    """Padding counts nothing, and a batch counts what its rows count alone."""
    params = hybrid_models.random_params(config)
    tokens = np.random.RandomState(1).randint(0, config.vocab_size, (2, 70))
    lengths = np.array([70, 5])

    @jax.jit
    def load(tokens, lengths):
        return hidden_states_and_load(params, config, plain_rows(tokens, lengths))[1]

    together = np.asarray(load(tokens, lengths))
    assert together.shape == (config.num_layers, 4)
    np.testing.assert_array_equal(together.sum(axis=1), (70 + 5) * 2)
    alone = load(tokens[:1], lengths[:1]) + load(tokens[1:, :5], lengths[1:])
    np.testing.assert_array_equal(together, alone)
    assert len(np.unique(together, axis=0)) == config.num_layers  # every layer has its own


def test_counting_leaves_the_forward_as_it_is():
    params = hybrid_models.random_params(MIXTURE)
    packed = plain_rows(np.arange(12).reshape(2, 6), np.array([6, 4]))
    counted, _ = hidden_states_and_load(params, MIXTURE, packed)
    np.testing.assert_array_equal(counted, hidden_states(params, MIXTURE, packed))
    assert hidden_states_and_load(
        hybrid_models.random_params(DENSE), DENSE, packed)[1] is None


class OneWord:
    def decode(self, tokens, **_):
        return "word"


class Judges:
    """Answers at once: sample g uses its first atom at level g mod 3, the others not."""

    shared = False

    def takes(self, prompt):
        return True

    def submit(self, record, sample_index, text):
        future = concurrent.futures.Future()
        levels = (sample_index % 3,) + (0,) * (len(record.atoms) - 1)
        future.set_result(Judgment(levels, True, None, ()))
        return future


def test_a_step_tells_the_load():
    record = load_records(sample_path("records.jsonl"))[0]
    prompts = [Prompt(0, record, tuple(range(1, 20))), Prompt(1, record, tuple(range(5, 30)))]
    settings = StepConfig(
        method="grpo", credit=CreditConfig.create(),
        sampling=SamplingConfig(num_samples=3, max_tokens=4),
        objective=ObjectiveConfig(compute_dtype="float32"),
        optimizer=OptimizerConfig(), mini_batch_size=3)

    def step(config, **router):
        params = hybrid_models.random_params(config)
        for name, value in router.items():
            params["layers"][name] = params["layers"][name] * 0 + value
        return train_step(init_state(params, settings.optimizer), params,
                          Policy(params, config, OneWord()), prompts, jax.random.key(0),
                          Judges(), settings).metrics

    # A router without an opinion sends every token to the first two experts.
    flat = step(MIXTURE, router=0.0)
    assert {name: value for name, value in flat.items() if name.startswith("router/")} == \
        pytest.approx({"router/load_max": 2.0, "router/load_entropy": np.log(2),
                       "router/unused": 0.5})
    uneven = step(MIXTURE)
    assert 1 < uneven["router/load_max"] < 2 and np.log(2) < uneven["router/load_entropy"]
    assert uneven["router/load_entropy"] < np.log(4)
