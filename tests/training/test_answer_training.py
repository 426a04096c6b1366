"""An answer agent learns to name what it is asked for, and resumes to the same numbers."""

import dataclasses
import json

import numpy as np
import pytest
from random_models import random_params
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from memcalib_jax.memory.traces import Trace
from memcalib_jax.models import ModelConfig
from memcalib_jax.training.answer_training import AnsweringConfig, train_answering
from memcalib_jax.training.logo import LogoConfig
from memcalib_jax.training.runner import RunConfig
from memcalib_jax.training.state import OptimizerConfig
from memcalib_jax.training.step import NoValidResponse

# An answer is one token: a policy can learn which one within a few steps.
WORDS = ["<end>", "<unk>", "user", "system", *(f"<answer>{name}</answer>" for name in
                                               ("boat", "cat", "dog", "tea"))]
CONFIG = ModelConfig("llama", vocab_size=len(WORDS), hidden_size=16, intermediate_size=24,
                     num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=128,
                     eos_ids=(0,))
PROMPTS = {"answer": "system"}
TRACES = [Trace("c", number, text, "cat") for number, text in enumerate(
    ["user user", "user system", "system user", "system system", "user boat", "boat user"])]
SETTINGS = AnsweringConfig(
    LogoConfig(level="token", entropy_weight=0.0, compute_dtype="float32"),
    OptimizerConfig(learning_rate=0.05), num_prompts=4, group_size=8, num_mini_batches=1,
    max_prompt_tokens=64, max_response_tokens=2, bin_tokens=256, eval_every=2)


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<end>",
        chat_template="{% for message in messages %}{{ message.content }} {% endfor %}")


def run(folder, tokenizer, num_steps, settings=SETTINGS, traces=TRACES, held_out=TRACES[:2]):
    return train_answering(RunConfig(folder, num_steps, 2, 7), random_params(CONFIG, scale=0.3),
                           CONFIG, tokenizer, traces, held_out, PROMPTS, settings,
                           lambda line: None)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_learns_and_resumes_to_the_same_numbers(tokenizer, tmp_path):
    whole = run(tmp_path / "whole", tokenizer, 6)
    rows = metrics(tmp_path / "whole")
    assert [row["step"] for row in rows] == list(range(7))
    assert rows[0].keys() >= {"eval/f1", "eval/bleu", "eval/tagged"}
    assert [("eval/f1" in row) for row in rows[1:]] == [False, True] * 3
    assert rows[1]["loss/first_ratio_error"] < 1e-5
    assert rows[-1]["rollout/f1"] > rows[1]["rollout/f1"] + 0.3
    assert rows[-1]["eval/f1"] == 1.0

    run(tmp_path / "parts", tokenizer, 2)
    parts = run(tmp_path / "parts", tokenizer, 6)
    again = metrics(tmp_path / "parts")
    for row, other in zip(rows, again, strict=True):
        for name in ("loss/total", "rollout/f1", "eval/f1"):
            assert row.get(name) == other.get(name)
    np.testing.assert_array_equal(whole.params["embed"], parts.params["embed"])


def test_a_question_that_is_too_long_is_left_out_and_counted(tokenizer, tmp_path):
    long = Trace("c", 9, " ".join(["user"] * 90), "cat")
    run(tmp_path / "one", tokenizer, 1, traces=[*TRACES[:3], long], held_out=[])
    row, = metrics(tmp_path / "one")
    assert row["rollout/too_long"] == 0.25
    with pytest.raises(NoValidResponse, match="exceeds --max_prompt_tokens=64"):
        run(tmp_path / "all", tokenizer, 1, dataclasses.replace(SETTINGS, num_prompts=1), [long],
            [])
