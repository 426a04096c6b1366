"""The tokenizer of a model on disk."""

from memcalib_jax.models.weights.checkpoint import ModelError
from memcalib_jax.models.weights.gguf import read_file, setting
from memcalib_jax.models.weights.hugging_face import read_json
from memcalib_jax.models.weights.locate import locate

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How text is cut before the merges, by GGUF's name of the vocabulary; the patterns belong to the
# vocabularies, and a GGUF file does not hold them. None: every digit alone, then GPT-2's rule.
_SPLITS = {
    "smollm": None,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,
    "llama-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,
}
_CONTROL, _USER_DEFINED = 3, 4


def load_tokenizer(path):
    """Loads the tokenizer of a model.

    Args:
      path: a Hugging Face folder, its name on the hub, or a .gguf file.

    Returns:
      A transformers tokenizer, with the model's chat template where it has one.

    Raises:
      ModelError: there is no tokenizer there, or one that cannot be read.
    """
    path = locate(path)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"{path}: there is no tokenizer ({', '.join(TOKENIZER_FILES)}); put the "
                         "files of the model's own there")
    # Imported here since it takes a second, and reading weights alone does not need it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    try:
        if _is_mistral(path):
            return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        return AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # The library raises many kinds for a damaged tokenizer.
        raise ModelError(f"{path}: the tokenizer cannot be read ({error})") from error


def _is_mistral(path):
    """Says whether a folder holds a model whose tokenizer.json is to be taken as it is.

    The automatic class may turn such a tokenizer into one of another library, which has other
    special tokens and no chat template, or into one that does not decode bytes.
    """
    config = path / "config.json"
    return config.is_file() and read_json(config).get("model_type") in ("mistral3", "ministral3")


def _from_gguf(path):
    """Builds the byte-level tokenizer that a GGUF file's metadata describe.

    transformers can read a GGUF tokenizer too, but needs torch for it.
    """
    from transformers import PreTrainedTokenizerFast

    reader = read_file(path)

    def metadata(key, default=None):
        return setting(reader, f"tokenizer.{key}", default)

    kind, splits = metadata("ggml.model"), metadata("ggml.pre")
    if kind != "gpt2" or splits not in _SPLITS:
        raise ModelError(
            f"{path}: its tokenizer ({kind}, {splits}) is not supported; known: gpt2 with "
            f"{', '.join(_SPLITS)}. Load the tokenizer from the model's Hugging Face folder")
    tokens = metadata("ggml.tokens")
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata(f"ggml.{key}_token_id")
        if index is not None:
            special[f"{name}_token"] = tokens[index]
    architecture = setting(reader, "general.architecture")
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(tokens, metadata("ggml.merges", ()),
                                     metadata("ggml.token_type", ()), splits),
        chat_template=metadata("chat_template"),
        add_bos_token=bool(metadata("ggml.add_bos_token", False)),
        add_eos_token=bool(metadata("ggml.add_eos_token", False)),
        model_max_length=setting(reader, f"{architecture}.context_length"),
        clean_up_tokenization_spaces=False, **special)


def _byte_level(tokens, merges, token_types, splits):
    from tokenizers import (
        AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers)

    tokenizer = Tokenizer(models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        ignore_merges=splits == "llama-bpe"))
    pattern = _SPLITS[splits]
    first = (pre_tokenizers.Digits(individual_digits=True) if pattern is None
             else pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)])
    if splits == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, token_types) if kind in (_CONTROL, _USER_DEFINED)])
    return tokenizer
