"""The sentence encoder against transformers, on random weights and, where installed, its own."""

import importlib.util
import json

import numpy as np
import pytest

from memcalib_jax.memory.minilm import PACKAGE, EncoderError, MiniLm, find_minilm
from memcalib_jax.memory.sample import sample_conversations

TEXTS = ["a cat", "the red boat sails on the cold river", "", "cat " * 400, "boat boat", "zebra"]


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory):
    """A random two-layer BERT in the files of a sentence encoder."""
    pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted(set(" ".join(TEXTS[:2]).split()))]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.enable_padding(length=128)  # as the published file has it
    import torch
    torch.manual_seed(0)
    model = BertModel(BertConfig(
        vocab_size=len(words), hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=40, max_position_embeddings=300, initializer_range=0.5))
    folder = tmp_path_factory.mktemp("encoder")
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def reference(folder, texts):
    """One text at a time, without padding."""
    import torch
    from tokenizers import Tokenizer
    from transformers import BertModel

    model = BertModel.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    rows = []
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([tokenizer.encode(text).ids])
            mean = model(ids, torch.ones_like(ids)).last_hidden_state[0].mean(0)
            rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)


def test_a_random_encoder_is_that_of_transformers(tiny_encoder):
    embedded = MiniLm(tiny_encoder).embed(TEXTS)
    np.testing.assert_allclose(embedded, reference(tiny_encoder, TEXTS), atol=3e-6)
    assert abs(embedded[0] @ embedded[1]) < 0.999


def test_a_text_does_not_know_its_company(tiny_encoder):
    encoder = MiniLm(tiny_encoder)
    alone = np.concatenate([encoder.embed([text]) for text in TEXTS])
    np.testing.assert_allclose(encoder.embed(TEXTS * 9), np.tile(alone, (9, 1)), atol=2e-6)
    assert encoder.embed([]).shape == (0, 24)


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed")
def test_the_published_encoder_is_that_of_transformers():
    pytest.importorskip("torch")
    conversation = sample_conversations()[0]
    texts = [turn.text for turn in conversation.sessions[0].turns] + [
        question.text for question in conversation.questions[:6]]
    embedded = MiniLm(find_minilm()).embed(texts)
    assert (embedded * reference(find_minilm(), texts)).sum(1).min() > 0.99999


def test_a_folder_that_holds_no_encoder(tiny_encoder, tmp_path):
    with pytest.raises(EncoderError, match="lacks config.json, tokenizer.json, model.safetensors"):
        MiniLm(tmp_path)
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_encoder / name).read_bytes())
    config = json.loads((tiny_encoder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(EncoderError, match=r"lacks the tensor 'encoder.layer.2"):
        MiniLm(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "roberta"}))
    with pytest.raises(EncoderError, match="no BERT with gelu"):
        MiniLm(tmp_path)
