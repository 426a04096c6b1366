"""Writes a training run's newest checkpoint as a Hugging Face folder.

    python -m experiments.export --model_path=/models/Qwen3-8B --checkpoint=runs/qwen3_8b \
        --output_dir=/models/Qwen3-8B-calibrated

--model_path is the model that the training started from: its settings, tokenizer and whatever is
no part of the text model are carried over, and a trained adapter is merged into its weights.
Without --checkpoint the model is written as it is: a .gguf file becomes a Hugging Face folder.
"""

from absl import flags

from experiments import common
from memcalib_jax.models import load, load_config
from memcalib_jax.models.lora import merge
from memcalib_jax.models.weights import export

FLAGS = flags.FLAGS

common.define_model_path_flag()
flags.DEFINE_string("checkpoint", None, "Folder of a training run, whose newest checkpoint gives "
                    "the parameters; default: those of --model_path.")
flags.DEFINE_string("output_dir", None, "Folder to write; it may exist, empty.", required=True)
flags.DEFINE_enum("dtype", None, ["bfloat16", "float32", "float16"],
                  "Of the weights; default: that of --model_path, bfloat16 for a .gguf file.")


def main():
    path = common.model_path()
    config = load_config(path)
    trained = common.open_checkpoint(FLAGS.checkpoint, config) if FLAGS.checkpoint else None
    dtype = FLAGS.dtype or ("bfloat16" if path.is_file() else None)
    export.check(FLAGS.output_dir, config, dtype=dtype, source=path)
    params = trained.params(path, join=merge) if trained else load(path)[0]
    export.save(FLAGS.output_dir, params, config, dtype=dtype, source=path)
    what = f"step {trained.step} of {FLAGS.checkpoint}" if trained else path
    print(f"wrote {what} to {FLAGS.output_dir}")


if __name__ == "__main__":
    common.run(main)
