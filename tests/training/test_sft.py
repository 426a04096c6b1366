import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_params

from memcalib_jax.data import load_records, sample_path
from memcalib_jax.data.demonstrations import Demonstration
from memcalib_jax.models import ModelConfig, logits
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.training.pairs import Pair, pack_pairs
from memcalib_jax.training.runner import RunConfig
from memcalib_jax.training.sft import (
    LikelihoodConfig, SftConfig, fine_tune, likelihood_sums, to_pair, token_loss)
from memcalib_jax.training.state import OptimizerConfig
from memcalib_jax.training.update import gradient_sums

CONFIG = ModelConfig("llama", 37, 16, 24, 2, 2, 1, 8, eos_ids=(3, 5))
PARAMS = random_params(CONFIG, scale=0.3)
OBJECTIVE = LikelihoodConfig("float32", "none")
SIZES = bin_sizes(64)


def make_pairs():
    """Five pairs; the first two share their prompt."""
    rng = np.random.default_rng(3)
    prompts = [tuple(map(int, rng.integers(0, 37, n))) for n in (9, 12, 7, 5)]
    responses = [tuple(map(int, rng.integers(0, 37, n))) for n in (6, 3, 8, 1, 5)]
    return [Pair(prompts[max(i - 1, 0)], response) for i, response in enumerate(responses)]


PAIRS = make_pairs()


def oracle(pairs):
    """Sums -log p over response tokens, a dense row a pair, in float64."""
    total, count = 0.0, 0
    for prompt, response in pairs:
        tokens = np.array([prompt + response])
        rows = np.asarray(logits(PARAMS, CONFIG, np.pad(tokens, [(0, 0), (0, 24 - tokens.size)]),
                                 np.array([tokens.size]))[0], np.float64)
        for t, token in enumerate(response):
            row = rows[len(prompt) - 1 + t]
            total -= row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
            count += 1
    return total, count


def sums(pairs, sizes=SIZES):
    packing = pack_pairs(CONFIG, pairs, sizes)
    return gradient_sums(PARAMS, CONFIG, packing.batches, OBJECTIVE, measure=likelihood_sums)


def assert_close(first, second):
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(second))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6 * scale)


def test_loss_is_the_mean_over_response_tokens():
    total, count = oracle(PAIRS)
    assert count == 23
    _, measured = sums(PAIRS)
    np.testing.assert_allclose(measured.loss, total, rtol=1e-5)
    assert float(measured.tokens) == count
    np.testing.assert_allclose(token_loss(PARAMS, CONFIG, PAIRS, SIZES), total / count, rtol=1e-5)


@pytest.mark.parametrize("pairs, sizes", [
    (PAIRS[::-1], SIZES), (PAIRS, (24,)), (PAIRS[2:] + PAIRS[:2], (40,))])
def test_bins_and_order_do_not_change_loss_and_gradient(pairs, sizes):
    gradient, whole = sums(PAIRS)
    other, parts = sums(pairs, sizes)
    assert_close(other, gradient)
    np.testing.assert_allclose(parts.loss, whole.loss, rtol=1e-6)


def test_a_repeated_pair_counts_twice():
    once, first = sums(PAIRS[:1])
    twice, second = sums([PAIRS[0], PAIRS[0]])
    assert float(second.tokens) == 2 * float(first.tokens) == 12
    assert_close(twice, jax.tree.map(lambda g: 2 * g, once))


def test_packed_values_come_back_in_the_pairs_order():
    pairs = [PAIRS[1], PAIRS[3], PAIRS[0], PAIRS[1]]
    packing = pack_pairs(CONFIG, pairs, (40,))
    values = [np.arange(len(pair.response), dtype=np.float32) + 10 * i
              for i, pair in enumerate(pairs)]
    rows, = packing.rows(packing.batched([values]))
    for row, value in zip(rows, values, strict=True):
        np.testing.assert_array_equal(row, value)
    rows, = packing.rows([batch.targets for batch in packing.batches])
    assert [tuple(row) for row in rows] == [pair.response for pair in pairs]


@pytest.mark.parametrize("steps_done, rate", [
    (0, 1 / 3), (1, 2 / 3), (2, 1.0), (6, 0.5), (8, 0.5 - np.sqrt(0.125)), (10, 0.0)])
def test_rate_rises_then_falls_by_a_cosine(steps_done, rate):
    optimizer = OptimizerConfig(2e-3, warmup_steps=2, total_steps=10)
    np.testing.assert_allclose(optimizer.rate(steps_done), 2e-3 * rate, atol=1e-9)


class Words:
    """A tokenizer whose words are their ids."""

    chat_template, bos_token_id = "a template", None

    def __init__(self, eos_token_id):
        self.eos_token_id = eos_token_id

    def apply_chat_template(self, messages, **_):
        return messages[0]["content"] + " " + messages[1]["content"]

    def encode(self, text, add_special_tokens):
        return [len(word) for word in text.split()]


@pytest.mark.parametrize("own, stop", [(5, 5), (9, 3), (None, 3)])
def test_a_response_ends_with_a_stop_token_of_the_model(own, stop):
    record = load_records(sample_path("records.jsonl"))[0]
    pair = to_pair(Words(own), CONFIG, Demonstration(record, "a bc def"), "atomic")
    assert pair.response == (1, 2, 3, stop)
    assert len(pair.prompt) > 20


class Killed(Exception):
    pass


def metrics(run_dir):
    return [{name: value for name, value in json.loads(line).items()
             if not name.startswith("time/")} for line in (run_dir / "metrics.jsonl").open()]


def test_an_interrupted_run_comes_to_the_same_numbers(tmp_path):
    settings = SftConfig(OBJECTIVE, OptimizerConfig(0.02, warmup_steps=1, total_steps=5), 2, 64, 2)

    def run(name, die_at=None):
        def report(line):
            if die_at and line.startswith(f"step {die_at}/"):
                raise Killed
        return fine_tune(RunConfig(tmp_path / name, 5, 2, 7), settings, PARAMS, CONFIG,
                         PAIRS[:4], PAIRS[4:], report)

    whole = run("whole")
    for step in (1, 3):
        with pytest.raises(Killed):
            run("parts", step)
    parts = run("parts")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    rows = metrics(tmp_path / "whole")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 2, 4, 5]
    np.testing.assert_allclose(
        rows[0]["eval/loss"], token_loss(PARAMS, CONFIG, PAIRS[4:], SIZES), rtol=1e-6)
    np.testing.assert_allclose(rows[2]["loss/learning_rate"], 0.02, rtol=1e-6)
    assert rows[5]["loss/total"] < rows[1]["loss/total"]
