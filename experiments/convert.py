"""Converts a model or a training run's newest checkpoint into a Hugging Face folder.

    python -m experiments.convert --model_path=/models/Qwen3-8B --checkpoint=runs/qwen3_8b \
        --output_dir=/models/Qwen3-8B-calibrated

--model_path is the model that the training started from: its settings, tokenizer and whatever is
no part of the text model are carried over, and a trained adapter is merged into its weights.
Without --checkpoint the model is written as it is: a .gguf file becomes a Hugging Face folder.
With --check the folder is read back, here and by transformers, and both must answer the same.
"""

import importlib.util

import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import common
from memcalib_jax.models import load, load_config, load_tokenizer, logits
from memcalib_jax.models.lora import merge
from memcalib_jax.models.weights import export

FLAGS = flags.FLAGS

common.define_model_path_flag()
flags.DEFINE_string("checkpoint", None, "Folder of a training run, whose newest checkpoint gives "
                    "the parameters; default: those of --model_path.")
flags.DEFINE_string("output_dir", None, "Folder to write; it may exist, empty.", required=True)
flags.DEFINE_enum("dtype", None, ["bfloat16", "float32", "float16"],
                  "Of the weights; default: that of --model_path, bfloat16 for a .gguf file.")
flags.DEFINE_bool("check", False, "Compare the logits of the written folder with those of "
                  "transformers in float32; needs torch, and memory for both models.")

CHECKED_TEXT = "The user is vegan, lives in Lisbon and asks what to cook for eight guests tonight."
LARGEST_DIFFERENCE = 1e-3


def main():
    if FLAGS.check and importlib.util.find_spec("torch") is None:
        raise common.UsageError(
            "--check needs torch, which is not installed: pip install -e '.[parity]'")
    path = common.model_path()
    config = load_config(path)
    if FLAGS.check:
        load_tokenizer(path)  # which the written folder gets
    trained = common.open_checkpoint(FLAGS.checkpoint, config) if FLAGS.checkpoint else None
    dtype = FLAGS.dtype or ("bfloat16" if path.is_file() else None)
    export.check(FLAGS.output_dir, config, dtype=dtype, source=path)
    params = trained.params(path, join=merge) if trained else load(path)[0]
    export.save(FLAGS.output_dir, params, config, dtype=dtype, source=path)
    what = f"step {trained.step} of {FLAGS.checkpoint}" if trained else path
    print(f"wrote {what} to {FLAGS.output_dir}")
    if FLAGS.check:
        del params
        check(FLAGS.output_dir)


def check(folder: str):
    """Compares a folder's logits here with those of transformers, both in float32.

    Prints the largest difference as a share of transformers' largest logit.

    Raises:
      UsageError: it is above `LARGEST_DIFFERENCE`, or transformers cannot load the folder.
    """
    tokens = np.asarray([load_tokenizer(folder).encode(CHECKED_TEXT)], np.int32)
    params, config = load(folder, dtype=jnp.float32)
    ours = np.asarray(logits(params, config, tokens, np.asarray([tokens.size])))
    theirs = _transformers_logits(folder, tokens)
    difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    print(f"largest difference from transformers: {difference:.1e} of the largest logit")
    if not difference <= LARGEST_DIFFERENCE:  # nor is NaN an agreement
        raise common.UsageError(
            f"transformers reads {folder} as another model: its logits differ by {difference:.1e}, "
            f"more than {LARGEST_DIFFERENCE}; the folder stays, but do not rely on it")


def _transformers_logits(folder, tokens) -> np.ndarray:
    import torch
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (ValueError, KeyError, ImportError, RuntimeError, OSError) as error:
        raise common.UsageError(f"transformers cannot load {folder}: {error}") from None
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens).long()).logits.numpy()


if __name__ == "__main__":
    common.run(main)
