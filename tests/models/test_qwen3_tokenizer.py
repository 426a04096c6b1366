"""The real Qwen3 tokenizer and its chat template; `MEMCALIB_QWEN3_TOKENIZER` names its folder."""

import os

import pytest

from memcalib_jax.data import build_messages, load_records, render, sample_path
from memcalib_jax.models import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    folder = os.environ.get("MEMCALIB_QWEN3_TOKENIZER")
    if not folder:
        pytest.skip("MEMCALIB_QWEN3_TOKENIZER names no folder with the Qwen3 tokenizer")
    return load_tokenizer(folder)


def test_a_prompt_comes_back_as_the_template_s_text(tokenizer):
    record = load_records(sample_path("records.jsonl"))[0]
    messages = build_messages(record)
    text = tokenizer.decode(render(tokenizer, messages))
    # Turns in Qwen3's markup, and an empty thought: the template's way of thinking off.
    assert text == (
        f"<|im_start|>system\n{messages[0]['content']}<|im_end|>\n"
        f"<|im_start|>user\n{messages[1]['content']}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_markup_and_end_are_single_tokens(tokenizer):
    assert tokenizer.encode("<|im_start|>", add_special_tokens=False) == [151644]
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [151645]
    assert tokenizer.eos_token_id == 151645


@pytest.mark.parametrize("text", [
    "The user's physiotherapist advised no running until the May review.",
    "a  b\tc\n\nd 1234567890", "用户喜欢喝茶。", "naïve café – “quotes” 🙂", "x = {'k': [1, 2]}  # note"])
def test_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
