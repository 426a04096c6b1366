"""Tokens to sentences: real tokenizers, random tokens, and the bounds on length."""

import os

import jax
import numpy as np
import pytest

from memcalib_jax.credit import CreditConfig, init_thresholds, memcalib_advantages
from memcalib_jax.data import load_responses, sample_path, sentence_ids
from memcalib_jax.data.sentence_edges import Edge
from memcalib_jax.data.sentences import token_edges, token_ends
from memcalib_jax.models import ModelError, default_model_path, load_tokenizer

MIXED = ("# Plan 🏃\n\nDon't run yet — naïve café plans “hurt”. 用户喜欢喝茶。很好！\n\n"
         "- Warm up 🧘‍♀️ first. Then stretch.\n- Sleep.\n\n```py\nx = {'k': [1, 2]}\n```\nहाँ। Done.")


class WordTokenizer:
    """One token a piece; "<s>" stands for a special token without text."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, ids, **_):
        return "".join(self.pieces[index] for index in ids if self.pieces[index] != "<s>")


def ids_of(*pieces, **bounds):
    return sentence_ids(WordTokenizer(*pieces), range(len(pieces)), **bounds).tolist()


@pytest.fixture(scope="module")
def smollm2_tokenizer():
    try:
        return load_tokenizer(default_model_path())
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def qwen3_tokenizer():
    folder = os.environ.get("MEMCALIB_QWEN3_TOKENIZER")
    if not folder:
        pytest.skip("MEMCALIB_QWEN3_TOKENIZER names no folder with the Qwen3 tokenizer")
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def sentencepiece_like():
    """Pieces whose leading space decoding drops at the start, and bytes for unknown characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Rest", "▁Walk",
              "▁now", ".", "\n", "R", "e", "s", "t", "W", "a", "l", "k", "n", "o", "w"]
    model = models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>",
                       byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


TOKENIZERS = ["smollm2_tokenizer", "qwen3_tokenizer", "sentencepiece_like"]


def check(ids, length):
    assert ids.dtype == np.int32 and ids.shape == (length,)
    if length:
        assert ids[0] == 0 and set(np.diff(ids)) <= {0, 1}
        assert np.bincount(ids).max() <= 96


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_random_token_is_in_one_sentence(name, request):
    tokenizer = request.getfixturevalue(name)
    random = np.random.default_rng(0)
    for _ in range(5000):
        tokens = random.integers(0, len(tokenizer), random.integers(0, 25))
        check(sentence_ids(tokenizer, tokens), len(tokens))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ends_cover_the_text_of_random_tokens(name, request):
    tokenizer = request.getfixturevalue(name)
    random = np.random.default_rng(1)
    # Mostly pieces of characters: single bytes and what else decodes to no whole character.
    broken = [token for token in range(min(len(tokenizer), 60_000))
              if "\ufffd" in tokenizer.decode([token])]
    assert len(broken) > 60
    for _ in range(300):
        tokens = np.where(random.random(30) < 0.7, random.choice(broken, 30),
                          random.integers(0, len(tokenizer), 30))
        text, ends = token_ends(tokenizer, tokens)
        assert text == tokenizer.decode(tokens, skip_special_tokens=True,
                                        clean_up_tokenization_spaces=False)
        assert len(ends) == 30 and ends[-1] == len(text)
        assert ends == sorted(ends) and ends[0] >= 0


@pytest.mark.parametrize("name", TOKENIZERS[:2])
def test_ends_are_the_tokenizer_s_own_offsets(name, request):
    tokenizer = request.getfixturevalue(name)
    encoded = tokenizer(MIXED, add_special_tokens=False, return_offsets_mapping=True)
    text, ends = token_ends(tokenizer, encoded["input_ids"])
    assert text == MIXED
    assert ends == [end for _, end in encoded["offset_mapping"]]


@pytest.mark.parametrize("name", TOKENIZERS[:2])
def test_sentences_of_a_mixed_text(name, request):
    tokenizer = request.getfixturevalue(name)
    tokens = tokenizer.encode(MIXED, add_special_tokens=False) + [tokenizer.eos_token_id]
    ids = sentence_ids(tokenizer, tokens, min_tokens=1)
    texts = [tokenizer.decode([token for token, sentence in zip(tokens, ids) if sentence == index],
                              skip_special_tokens=True) for index in range(ids[-1] + 1)]
    assert [text.strip() for text in texts] == [
        "# Plan 🏃\n\nDon't run yet — naïve café plans “hurt”.", "用户喜欢喝茶。", "很好！",
        "- Warm up 🧘‍♀️ first.", "Then stretch.", "- Sleep.", "```py\nx = {'k': [1, 2]}\n```",
        "हाँ।", "Done."]


def test_the_sample_s_responses_stay_within_bounds(smollm2_tokenizer):
    for response in load_responses(sample_path("responses.jsonl"))[::4]:
        tokens = smollm2_tokenizer.encode(response.text)
        ids = sentence_ids(smollm2_tokenizer, tokens)
        check(ids, len(tokens))
        assert np.bincount(ids).min() >= 4


def test_a_dropped_leading_space_shifts_nothing(sentencepiece_like):
    tokens = sentencepiece_like.convert_tokens_to_ids(
        ["▁Rest", "▁now", ".", "▁Walk", "▁", "<0xE7>", "<0x94>", "<0xA8>", ".", "▁Rest", "</s>"])
    text, ends = token_ends(sentencepiece_like, tokens)
    assert text == "Rest now. Walk 用. Rest"
    assert ends == [4, 8, 9, 14, 15, 16, 16, 16, 17, 22, 22]
    assert sentence_ids(sentencepiece_like, tokens, min_tokens=1).tolist() == [
        0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2]


def test_special_tokens_go_with_what_is_before_them():
    assert ids_of("One", " two", " three", ".", "<s>", " Four", " five", " six", ".", "<s>") == [
        0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert ids_of("<s>", "<s>") == [0, 0]
    assert ids_of() == [] and ids_of("One") == [0] and ids_of(" ", "\n") == [0, 0]


@pytest.mark.parametrize("pieces, ids", [
    # White space belongs to what is before it; a token's own leading space does not.
    ((" One", " two", " three", ".", " \n\n", " Four", " five", " six", "."), [0] * 5 + [1] * 4),
    # A token over an edge belongs to where it begins, the next one to the new sentence.
    (("One", " two", " three", " end. Four", " five", " six", " seven", "."), [0] * 4 + [1] * 4),
    # Too short: to the right, or at the end to the left.
    (("Yes", ".", " One", " two", " three", "."), [0] * 6),
    (("One", " two", " three", ".", " Yes", "."), [0] * 6),
    (("Yes", ".", " No", ".", " One", " two", " three", "."), [0, 0, 0, 0, 1, 1, 1, 1]),
    # Never over the end of an ordered item or a code block.
    (("1.", " One", "\n", "2.", " Two", "\n", "3.", " Three"), [0, 0, 0, 1, 1, 1, 2, 2]),
    (("- ", "One", "\n", "- ", "Two", "\n"), [0] * 6),
    (("Run", ":", "\n", "```\n", "a", "\n```", "\n", "Ok", "."), [0, 0, 0, 1, 1, 1, 1, 2, 2]),
])
def test_short_sentences(pieces, ids):
    assert ids_of(*pieces) == ids


def sizes_of(*pieces, **bounds):
    return np.bincount(ids_of(*pieces, **bounds)).tolist()


def test_long_sentences_are_cut_where_it_hurts_least():
    words = [" word"] * 97
    assert sizes_of(*words) == [93, 4]
    assert sizes_of(*[" word"] * 60, ",", *[" word"] * 60) == [61, 60]
    assert sizes_of(*[" word"] * 60, ",", *[" word"] * 10, "\n", *[" word"] * 60) == [72, 60]
    # A comma out of reach (before the middle) does not count; words do before insides of words.
    assert sizes_of(*[" word"] * 20, ",", *["x"] * 69, " word", *["x"] * 30) == [90, 31]


def test_bounds_may_be_chosen():
    assert sizes_of(*[" word"] * 20, max_tokens=8) == [8, 8, 4]
    assert ids_of("Yes", ".", " No", ".", min_tokens=1) == [0, 0, 1, 1]
    for bounds in ({"min_tokens": 0}, {"max_tokens": 7}):
        with pytest.raises(ValueError, match="min_tokens"):
            ids_of("a", **bounds)


def test_edges_between_tokens():
    edges = token_edges("Ab c. De", [1, 2, 4, 5, 8], {3: Edge.WORD, 6: Edge.SENTENCE})
    assert edges.tolist() == [
        Edge.INSIDE, Edge.INSIDE, Edge.WORD, Edge.INSIDE, Edge.SENTENCE]


def test_credit_takes_them_padded(smollm2_tokenizer):
    """One row of sentence ids, padded with 0, gives one multiplier a sentence."""
    tokens = smollm2_tokenizer.encode("You should rest now. You should walk every day instead.")
    ids = sentence_ids(smollm2_tokenizer, tokens)
    assert ids[-1] == 1
    length, width = len(tokens), len(tokens) + 5
    padded = np.zeros((1, 2, width), np.int32)
    padded[..., :length] = ids
    mask = np.broadcast_to(np.arange(width) < length, (1, 2, width))
    rewards = np.zeros((1, 2, 9), np.float32)
    rewards[0, 0, 8] = 1.0
    full = np.zeros((1, 2, width), np.float32)
    ablated = np.full((1, 2, 9, width), np.nan, np.float32)
    ablated[..., :length] = np.where(ids == 1, -1.0, 0.0)
    _, diagnostics = jax.jit(memcalib_advantages)(
        rewards, np.ones((1, 2), bool), full, ablated, rewards != 0, mask, init_thresholds(),
        CreditConfig.create(granularity="sentence"), sentence_ids_P_G_T=padded)
    multipliers = np.asarray(diagnostics.multipliers)[0, 0, 8]
    np.testing.assert_allclose(multipliers[:length], np.where(ids == 1, length / sum(ids), 0.0),
                               rtol=1e-5)
    assert not multipliers[length:].any()
