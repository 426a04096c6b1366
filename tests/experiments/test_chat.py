"""`python -m experiments.chat`: questions in, answers out, as the sampler draws them."""

import dataclasses
import json
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
from safetensors.numpy import load_file, save_file

from memcalib_jax import models
from memcalib_jax.data import build_messages, load_records, render
from memcalib_jax.sampling import sample
from memcalib_jax.training.checkpoint import Checkpoints
from memcalib_jax.training.state import OptimizerConfig, init_state

ROOT = pathlib.Path(__file__).parents[2]
QUESTIONS = ("What should I cook tonight?", "And tomorrow?")
MEMORIES = ("The user is vegan.", "The user works with Python.")


def command(*flags):
    return [sys.executable, "-m", "experiments.chat", "--dtype=float32",
            "--max_response_tokens=20", *flags]


def talk(*flags):
    process = subprocess.run(command(*flags), cwd=ROOT, capture_output=True, text=True,
                             input=f"{QUESTIONS[0]}\n\n  {QUESTIONS[1]}", timeout=300)
    assert process.returncode == 0 and process.stderr == "", process.stderr
    return process.stdout


def expected(model_dir, prompts, *, seed=0, params=None, **options):
    """The answers, from whole responses."""
    loaded, config = models.load(model_dir, dtype=jnp.float32)
    tokenizer = models.load_tokenizer(model_dir)
    answers = ""
    for number, messages in enumerate(prompts):
        (drawn,), = sample(params or loaded, config, [render(tokenizer, messages)], num_samples=1,
                           max_tokens=20, stop_ids=config.eos_ids,
                           key=jax.random.fold_in(jax.random.key(seed), number), **options)
        kept = [token for token in drawn.tokens if token not in config.eos_ids]
        answers += tokenizer.decode(kept, skip_special_tokens=True,
                                    clean_up_tokenization_spaces=False) + "\n"
    return answers


def test_answers_are_the_samplers(tiny_model_dir, records_file):
    record = load_records(records_file)[0]
    blocks = "\n".join(f"[{number}] {block.fluent_text}"
                       for number, block in enumerate(record.blocks, start=1))
    number = len(record.blocks)
    system = build_messages(record)[0]
    prompts = [[system, {"role": "user", "content": (
        f"Memories:\n{blocks}\n[{number + 1}] {MEMORIES[0]}\n[{number + 2}] {MEMORIES[1]}\n\n"
        f"Question:\n{question}")}] for question in QUESTIONS]
    answers = talk(f"--model_path={tiny_model_dir}", f"--records_file={records_file}",
                   f"--record_id={record.id}", *(f"--memory={text}" for text in MEMORIES),
                   "--seed=3", "--top_p=0.9")
    assert len(answers.split()) > 4
    assert answers == expected(tiny_model_dir, prompts, seed=3, temperature=0.7, top_p=0.9)


def test_a_checkpoint_answers_without_memories(tiny_model_dir, records_file, tmp_path):
    params, _ = models.load(tiny_model_dir, dtype=jnp.float32)
    params = params | {"embed": params["embed"][:, ::-1]}
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, init_state(params, OptimizerConfig()), {})
    checkpoints.close()
    nothing = dataclasses.replace(load_records(records_file)[0], blocks=(), atoms=())
    prompts = [build_messages(dataclasses.replace(nothing, question=question))
               for question in QUESTIONS]
    answers = talk(f"--model_path={tiny_model_dir}", f"--checkpoint={tmp_path}",
                   "--temperature=0")
    assert answers == expected(tiny_model_dir, prompts, params=params, temperature=0)
    assert answers != expected(tiny_model_dir, prompts, temperature=0)


def test_an_interrupt_ends_it_at_once(tiny_model_dir):
    with subprocess.Popen(
            command(f"--model_path={tiny_model_dir}"), cwd=ROOT, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write(QUESTIONS[0] + "\n")
        assert process.stdout.readline().endswith("\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == -signal.SIGINT
        assert process.stderr.read() == ""


def test_characters_are_written_whole(capsys):
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    from experiments.chat import Writer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # each byte is a token
    bytes_only = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only)
    text = "Caff\u00e8 , \u65e5\u672c \U0001f642!"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode()) == 21
    writer, pieces = Writer(tokenizer, stop_ids=(500,)), []
    for token in [*tokens, tokens[4], 500]:  # cut within a character
        writer.write(token)
        pieces.append(capsys.readouterr().out)
    assert [piece for piece in pieces if piece] == list(text)
    assert pieces[4:6] == ["", "\u00e8"] and pieces[-2:] == ["", ""]


def changed(model_dir, folder, file, change):
    """Copies a model with one of its JSON or text files changed; returns the flag that names it."""
    shutil.copytree(model_dir, folder)
    text = (folder / file).read_text() if (folder / file).exists() else "{}"
    (folder / file).write_text(
        change if isinstance(change, str) else json.dumps(json.loads(text) | change))
    return f"--model_path={folder}"


def fewer_tokens(model_dir, folder):
    """Copies a model without the last rows of its embedding; returns the flag that names it."""
    flag = changed(model_dir, folder, "config.json", {"vocab_size": 50})
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:50].copy()
    save_file(tensors, folder / "model.safetensors")
    return flag


def test_mistakes_are_refused(tiny_model_dir, records_file, run_program, tmp_path):
    model = f"--model_path={tiny_model_dir}"
    (tmp_path / "broken.jsonl").write_text('{"id": "a"}')
    cases = {
        "holds no --record_id=nobody; it holds ": [model, "--record_id=nobody"],
        "--record_id is looked up: give both": [model, f"--records_file={records_file}"],
        "holds no whole checkpoint": [model, f"--checkpoint={tmp_path}"],
        "there is no such file or folder": [f"--model_path={tmp_path / 'absent'}"],
        "with --max_response_tokens=4000 they exceed the model's 2048 positions": [
            model, "--max_response_tokens=4000"],
        "broken.jsonl, line 1, record 'a', field domain: is missing": [
            model, "--record_id=a", f"--records_file={tmp_path / 'broken.jsonl'}"],
        "--model_path is empty": ["--model_path="],
        "--checkpoint is empty": [model, "--checkpoint="],
        "of a prompt is none of the model's, whose vocabulary has 50": [
            fewer_tokens(tiny_model_dir, tmp_path / "fewer")],
        "token id 999 that ends a response (eos_token_id) is none": [changed(
            tiny_model_dir, tmp_path / "end", "generation_config.json", {"eos_token_id": 999})],
        "chat template leaves nothing of a prompt": [changed(
            tiny_model_dir, tmp_path / "template", "chat_template.jinja", "{# nothing #}")],
    }
    answers = run_program("experiments.chat", *cases.values())
    for message, answer in zip(cases, answers, strict=True):
        assert answer["status"] == 2 and answer["out"] == ""
        assert answer["err"].startswith("error: ") and message in answer["err"]
