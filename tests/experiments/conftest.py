"""Programs run as their users run them, and a model small enough for that."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from safetensors.numpy import save_file

from memcalib_jax.data import load_records, sample_path
from memcalib_jax.judge.server import serve

ROOT = pathlib.Path(__file__).parents[2]
HIDDEN, HEADS, LAYERS = 32, 4, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """A random two-layer llama whose words are those of the first sample records.

    Every token but the specials is a word, so that a random response is text with words that
    memories hold too.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<unk>", "<|im_start|>", "<|im_end|>"]
    texts = [atom.text for record in load_records(sample_path("records.jsonl"))[:8]
             for atom in record.atoms]
    words = sorted(set(re.findall(r"\w+|[^\w\s]+", " ".join(texts))))
    vocabulary = {word: index for index, word in enumerate([*specials, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tiny_model")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>",
        pad_token="<|im_end|>", additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": len(vocabulary), "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048,
        "tie_word_embeddings": True, "eos_token_id": vocabulary["<|im_end|>"]}))
    save_file(_weights(len(vocabulary)), folder / "model.safetensors")
    return folder


def _weights(vocab_size):
    random = np.random.RandomState(0)
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
              "self_attn.v_proj": (HIDDEN // 2, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
              "mlp.gate_proj": (2 * HIDDEN, HIDDEN), "mlp.up_proj": (2 * HIDDEN, HIDDEN),
              "mlp.down_proj": (HIDDEN, 2 * HIDDEN)}
    tensors = {"model.embed_tokens.weight": 0.3 * random.standard_normal((vocab_size, HIDDEN)),
               "model.norm.weight": np.ones(HIDDEN)}
    for layer in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN)
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = (
                random.standard_normal(shape) * shape[1] ** -0.5)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


@pytest.fixture(scope="session")
def records_file(tmp_path_factory):
    """The first four sample records, of which one each is of coding, general and health."""
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    lines = sample_path("records.jsonl").read_text().splitlines(keepends=True)
    chosen = {json.loads(line)["domain"]: line for line in lines[::-1]}
    path.write_text("".join([*chosen.values(), lines[1]]))
    return path


@pytest.fixture(scope="session")
def judge_url():
    """The lexical stand-in, served on this machine."""
    with serve() as server:
        yield server.base_url


# Runs a program once with each list of flags that comes in, in one process: starting one takes
# seconds. What each printed and its status go out.
_DRIVER = """
import contextlib, io, json, os, runpy, sys
from absl import app
from absl.testing import flagsaver
module, answers = sys.argv[1], os.fdopen(int(sys.argv[2]), "w")

def run_all(main, flags_parser):
    from experiments import common
    for line in sys.stdin:
        case = json.loads(line)
        out, err = io.StringIO(), io.StringIO()
        with (flagsaver.flagsaver(), contextlib.redirect_stdout(out),
              contextlib.redirect_stderr(err)):
            try:
                status = main(flags_parser([sys.argv[0], *case]))
            except SystemExit as stop:
                status = stop.code
        common._held_locks.clear()
        print(json.dumps({"status": status, "out": out.getvalue(), "err": err.getvalue()}),
              file=answers, flush=True)

app.run = run_all
del sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@contextlib.contextmanager
def _opened(module, environ):
    theirs, ours = os.pipe()
    with tempfile.TemporaryFile("w+") as told, os.fdopen(theirs) as answers:
        process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, module, str(ours)], cwd=ROOT, text=True,
            pass_fds=[ours], stdin=subprocess.PIPE, stdout=told, stderr=told,
            env={**os.environ, **environ})
        os.close(ours)

        def ask(*arguments):
            process.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
            process.stdin.flush()
            line = answers.readline()
            if not line:
                told.seek(0)
                pytest.fail(told.read())
            return json.loads(line)

        try:
            yield ask
        finally:
            process.communicate()


@pytest.fixture(scope="session")
def run_program():
    """Runs `python -m module` with each list of flags; returns dicts of status, out and err."""
    def run(module, *cases):
        with _opened(module, {}) as ask:
            return [ask(*case) for case in cases]

    return run


@pytest.fixture(scope="module")
def open_program():
    """Starts `python -m module` once; what is returned runs it with flags, as often as called."""
    with contextlib.ExitStack() as stack:
        yield lambda module, **environ: stack.enter_context(_opened(module, environ))
