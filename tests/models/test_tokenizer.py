"""Tokenizers out of GGUF files."""

import json

import gguf
import pytest

from memcalib_jax import models

TEXTS = ("It's 2026.", "don't  stop\n\n  now", "x = 12345;\n\treturn  y",
         "naïve café — 你好 🙂")


def write_byte_level(path, pre, merges=(), add_bos=False):
    """Writes a GGUF file with a byte-level vocabulary and no tensors."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = list(bytes_to_unicode().values())
    special = ["<|end|>", "<think>"]
    tokens = alphabet + ["".join(merge.split(" ")) for merge in merges] + special
    types = [1] * (len(tokens) - len(special)) + [3, 4]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_bos_token_id(tokens.index("!"))
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def words(tokenizer, text):
    return [tokenizer.decode([i]) for i in tokenizer(text)["input_ids"]]


def test_smollm2_tokens(smollm2):
    """Digits stand alone, and spaces before them stay together."""
    tokenizer = smollm2[2]
    assert words(tokenizer, "Hello  world, 12 345  67") == [
        "Hello", " ", " world", ",", " ", "1", "2", " ", "3", "4", "5", "  ", "6", "7"]
    for text in ("naïve café 你好 🙂\n\t x", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("<|im_start|>user\nhi<|im_end|>")["input_ids"] == [1, 4093, 198, 6004, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert len(tokenizer) == 49152


def test_smollm2_chat_template(smollm2):
    text = smollm2[2].apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\n")


def test_smollm2_equals_transformers(smollm2):
    """Where no two spaces stand before a digit, the rule that transformers assumes is the same."""
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    path = models.default_model_path()
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in TEXTS + ("<|im_start|>user\nWhat's up?<|im_end|>",):
        assert smollm2[2](text)["input_ids"] == reference(text)["input_ids"], text


def test_merges_and_special_tokens(tmp_path):
    tokenizer = models.load_tokenizer(write_byte_level(
        tmp_path / "t.gguf", "qwen2", merges=("a b", "ab c", "1 2")))
    assert words(tokenizer, "abcab<think>ab<|end|>12") == [
        "abc", "ab", "<think>", "ab", "<|end|>", "1", "2"]
    assert tokenizer.eos_token == "<|end|>"
    assert set(tokenizer.all_special_tokens) == {"<|end|>", "!"}
    assert tokenizer.decode(tokenizer("ab<|end|>")["input_ids"], skip_special_tokens=True) == "ab"
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": "abc"}], return_dict=False) == [
            *tokenizer("abc<|end|>")["input_ids"]]


@pytest.mark.parametrize("add_bos", [False, True])
def test_bos_is_added_where_the_file_says_so(add_bos, tmp_path):
    tokenizer = models.load_tokenizer(
        write_byte_level(tmp_path / "t.gguf", "qwen2", add_bos=add_bos))
    assert words(tokenizer, "ab") == ["!"] * add_bos + ["a", "b"]


def test_qwen_normalizes(tmp_path):
    """A letter and its combining accent are the composed letter (NFC), as Qwen's own file says."""
    tokenizer = models.load_tokenizer(write_byte_level(tmp_path / "t.gguf", "qwen2"))
    assert tokenizer("e\u0301")["input_ids"] == tokenizer("\u00e9")["input_ids"]


@pytest.mark.parametrize("pre, expected", [
    ("qwen2", ["1", "2", "3", "4"]), ("llama-bpe", ["12", "3", "4"]),
    ("smollm", ["1", "2", "3", "4"])])
def test_digits(pre, expected, tmp_path):
    tokenizer = models.load_tokenizer(
        write_byte_level(tmp_path / "t.gguf", pre, merges=("1 2", "3 4")))
    assert words(tokenizer, "1234") == expected


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_splits_equal_transformers(pre, tmp_path):
    pytest.importorskip("torch")
    from transformers.integrations.gguf import convert_gguf_tokenizer

    merges = ("Ġ Ġ", "Ċ Ċ", "1 2", "' s", "Ġ s", "Ġs t", ". Ċ", "o p", "n o", "ĠĠ Ġ")
    ours = models.load_tokenizer(write_byte_level(tmp_path / "t.gguf", pre, merges=merges))
    vocab = ours.get_vocab()
    tokens = sorted(vocab, key=vocab.get)
    theirs, _ = convert_gguf_tokenizer("qwen2", {
        "tokenizer_type": "gpt2", "pre_tokenizer_type": pre, "tokens": tokens,
        "merges": list(merges), "token_type": [1] * (len(tokens) - 2) + [3, 4]})
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs.encode(text).ids, text


@pytest.mark.parametrize("pre", ["deepseek-llm", "default"])
def test_unknown_split_is_refused(pre, tmp_path):
    path = write_byte_level(tmp_path / "t.gguf", pre)
    with pytest.raises(models.ModelError, match=f"gpt2, {pre}"):
        models.load_tokenizer(path)


@pytest.mark.parametrize("model_type, tokenizer_class", [
    ("mistral3", "LlamaTokenizerFast"), ("mistral3", "MistralCommonBackend"),
    ("ministral3", "TokenizersBackend")])
def test_ministral_text_tokenizer(model_type, tokenizer_class, tmp_path, monkeypatch):
    """tokenizer.json as it is, whatever class its config names; no automatic choice."""
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models as kinds, pre_tokenizers, trainers

    tokenizer = Tokenizer(kinds.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(
            Regex(r"\p{N}| ?[^\s\p{L}\p{N}]+|[^\p{L}\p{N}]?\p{L}+|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(["the ship at dawn"] * 3, trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": tokenizer_class, "bos_token": "<s>", "eos_token": "</s>"}))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[INST]{{ m['content'] }}[/INST]{% endfor %}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", None)
    loaded = models.load_tokenizer(tmp_path)
    for text in TEXTS:
        ids = loaded(text, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer.encode(text).ids
        assert loaded.decode(ids) == text
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)
    assert loaded.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, enable_thinking=False
    ) == "[INST]hi[/INST]"
