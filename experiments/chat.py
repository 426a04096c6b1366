r"""Talks to a model that is given memories: a question a line, each on its own.

    python -m experiments.chat --model_path=/models/Qwen3-8B --checkpoint=runs/qwen3_8b \
        --memory="The user is vegan." --memory="The user lives in Lisbon."

Questions come from the standard input, until it ends or Ctrl-C. No question knows of those before.
"""

import dataclasses
import signal
import sys

import jax
import jax.numpy as jnp
from absl import flags

from experiments import common, console
from memcalib_jax.data import (
    Block, Record, build_messages, load_records, render, sample_path)
from memcalib_jax.models import load, load_config, load_tokenizer
from memcalib_jax.sampling import sample
from memcalib_jax.training.state import matrices_in

FLAGS = flags.FLAGS

common.define_model_path_flag()
common.define_cache_flag()
flags.DEFINE_string("checkpoint", None, "Folder of a training run, whose newest checkpoint gives "
                    "the parameters; --model_path gives their shape and the tokenizer.")
flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Inputs of matrix products.")
flags.DEFINE_multi_string("memory", [], "A memory about the user; may be given several times.")
flags.DEFINE_string("record_id", None, "Record whose memories come first.")
flags.DEFINE_string("records_file", None, "Where --record_id is looked up (JSONL); default: the "
                    "sample records.")
flags.DEFINE_float("temperature", 0.7, "Temperature of the answers; 0: the most likely token.",
                   lower_bound=0)
flags.DEFINE_float("top_p", 1.0, "Nucleus of the answers.", lower_bound=1e-6, upper_bound=1)
flags.DEFINE_integer("max_response_tokens", 256, "Most tokens of an answer.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of sampling.", lower_bound=0, upper_bound=2**32 - 1)


def main():
    # There is nothing to save, and an exception might be raised where a callback swallows it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    memories = remembered()
    path = common.model_path()
    config, tokenizer = load_config(path), load_tokenizer(path)
    trained = common.open_checkpoint(FLAGS.checkpoint, config) if FLAGS.checkpoint else None

    def prompt(question: str) -> list[int]:
        record = dataclasses.replace(memories, question=question)
        return render(tokenizer, build_messages(record, representation="fluent"))

    try:
        tokens = prompt("?")
    except ValueError as error:
        raise common.UsageError(str(error)) from None
    common.check_vocabulary([tokens], config)
    if len(tokens) + FLAGS.max_response_tokens > config.max_positions:
        raise common.UsageError(
            f"the memories take {len(tokens)} tokens; with --max_response_tokens="
            f"{FLAGS.max_response_tokens} they exceed the model's {config.max_positions} positions")
    params = matrices_in(
        trained.params(path) if trained else load(path, dtype=jnp.float32)[0], FLAGS.dtype)

    for number, question in enumerate(console.lines()):
        writer = Writer(tokenizer, config.eos_ids)
        try:
            sample(params, config, [prompt(question)], num_samples=1,
                   max_tokens=FLAGS.max_response_tokens, temperature=FLAGS.temperature,
                   top_p=FLAGS.top_p, stop_ids=config.eos_ids,
                   key=jax.random.fold_in(jax.random.key(FLAGS.seed), number),
                   on_token=lambda _, __, token: writer.write(token))
        except ValueError as error:  # too long a question is no reason to go
            print(f"error: {error}", file=sys.stderr, end="")
        print(flush=True)


def remembered() -> Record:
    """Returns a record of the memories that the flags give, without a question.

    Raises:
      UsageError: there is no such record.
    """
    given = tuple(Block(f"memory_{number}", text, text, ())
                  for number, text in enumerate(map(str.strip, FLAGS.memory), start=1))
    if FLAGS.record_id is None:
        if FLAGS.records_file:
            raise common.UsageError("--records_file says where --record_id is looked up: give both")
        return Record("chat", "general", "", given, ())
    file = FLAGS.records_file or sample_path("records.jsonl")
    records = {record.id: record for record in load_records(file)}
    if FLAGS.record_id not in records:
        raise common.UsageError(f"{file} holds no --record_id={FLAGS.record_id}; it holds "
                                + ", ".join(list(records)[:5])
                                + (" ..." if len(records) > 5 else ""))
    record = records[FLAGS.record_id]
    return dataclasses.replace(record, blocks=record.blocks + given)


class Writer:
    """Writes the text of tokens as they come, whole characters only."""

    def __init__(self, tokenizer, stop_ids):
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._tokens, self._written = [], ""

    def write(self, token: int):
        """Writes what a token adds; nothing for a stop token."""
        if token in self._stop_ids:
            return
        self._tokens.append(token)
        # Decoded anew as a whole, since a token alone may lack its space or part of a character.
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True,
                                      clean_up_tokenization_spaces=False)
        if not text.endswith("\ufffd"):
            print(text[len(self._written):], end="", flush=True)
            self._written = text


if __name__ == "__main__":
    common.run(main)
