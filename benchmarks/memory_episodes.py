"""How fast is memory built in batches, what does sharing prompts save, how fast is the encoder?

    python -m benchmarks.memory_episodes --trajectories=8 --max_tokens=32

The first session of a built-in conversation is read by all trajectories side by side, and by each
alone; both run once before they are timed. Shared prefill is counted over the session:
trajectories share a prompt until they have said different things, rerolls likewise. The encoder is held against transformers on torch over the
turns of the built-in conversations. The last line is one JSON object.
"""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import floor
from memcalib_jax.memory.agents import LocalAgent
from memcalib_jax.memory.bank import Bank
from memcalib_jax.memory.episodes import EpisodeConfig, Start, run_sessions
from memcalib_jax.memory.minilm import PACKAGE, MiniLm, find_minilm
from memcalib_jax.memory.retrieval import Retriever, WordEncoder
from memcalib_jax.memory.roles import load_prompts
from memcalib_jax.memory.sample import sample_conversations
from memcalib_jax.models import default_model_path, load, load_tokenizer

FLAGS = flags.FLAGS
flags.DEFINE_integer("trajectories", 8, "Trajectories side by side; 0: time the encoder alone.")
flags.DEFINE_integer("chunks", 2, "Parts of the session.")
flags.DEFINE_integer("max_tokens", 32, "Longest reply.")
flags.DEFINE_integer("repeats", 1, "Counted runs.")


def episode_rates() -> dict:
    """Returns tokens a second side by side and alone, and the share of prompts computed."""
    path = default_model_path()
    params, config = load(path, dtype=jnp.float32)
    tokenizer, prompts = load_tokenizer(path), load_prompts()
    conversation = sample_conversations()[0]
    session = conversation.sessions[0]
    settings = EpisodeConfig(num_chunks=FLAGS.chunks)
    starts = [Start(conversation, session, t, Bank(conversation.speakers, seed=conversation.id))
              for t in range(FLAGS.trajectories)]

    def read(batches):
        agent = LocalAgent(params, config, tokenizer, key=jax.random.key(0),
                           max_tokens=FLAGS.max_tokens, max_prompt_tokens=4096)
        agents = dict.fromkeys(settings.roles, agent)
        retriever = Retriever(WordEncoder())
        for batch in batches:
            run_sessions(batch, agents, retriever, prompts, settings)
        return agent.counts

    ways = {"batched": [starts], "alone": [[start] for start in starts]}
    rates = {}
    for name, batches in ways.items():
        counts = read(batches)
        seconds = floor.median(floor.seconds(lambda: read(batches), repeats=FLAGS.repeats))
        rates[name] = {"seconds": seconds,
                       "reply_tokens_per_second": counts["reply_tokens"] / seconds,
                       "reply_tokens": counts["reply_tokens"],
                       "prompt_tokens": counts["prompt_tokens"],
                       "prefill_saved": 1 - counts["prefilled_tokens"] / counts["prompt_tokens"]}
    return rates


def encoder_rates() -> dict:
    """Returns texts a second of the encoder in JAX and in transformers; the lowest cosine."""
    texts = [turn.text for conversation in sample_conversations()
             for session in conversation.sessions for turn in session.turns]
    encoder = MiniLm(find_minilm())
    ways = {"jax": encoder.embed}
    if importlib.util.find_spec("torch"):
        ways["torch"] = transformers_encoder()
    vectors = {name: embed(texts) for name, embed in ways.items()}
    rates = {"texts": len(texts)} | {
        f"{name}_texts_per_second": len(texts) / floor.median(
            floor.seconds(lambda: embed(texts), repeats=3)) for name, embed in ways.items()}
    if "torch" in vectors:
        rates["lowest_cosine"] = float((vectors["jax"] * vectors["torch"]).sum(1).min())
    return rates


def transformers_encoder(batch_size: int = 32):
    """Returns what embeds as sentence encoders usually do: by falling length, padded in batches."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(find_minilm())
    model = AutoModel.from_pretrained(find_minilm()).eval()

    @torch.no_grad()
    def embed(texts):
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        rows = np.zeros((len(texts), model.config.hidden_size), np.float32)
        for first in range(0, len(order), batch_size):
            chosen = order[first:first + batch_size]
            batch = tokenizer([texts[i] for i in chosen], padding=True, truncation=True,
                              max_length=256, return_tensors="pt")
            mask = batch["attention_mask"][..., None]
            mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            rows[chosen] = torch.nn.functional.normalize(mean).numpy()
        return rows

    return embed


def main(argv):
    rates = episode_rates() if FLAGS.trajectories else {}
    for name, rate in rates.items():
        print(f"{name}: {rate['reply_tokens_per_second']:.1f} reply tokens/s, {rate['seconds']:.1f} "
              f"s, {rate['prefill_saved']:.0%} of {rate['prompt_tokens']} prompt tokens shared")
    if importlib.util.find_spec(PACKAGE):
        rates["encoder"] = encoder_rates()
        print(f"encoder: {rates['encoder']['jax_texts_per_second']:.0f} texts/s in JAX, "
              f"{rates['encoder'].get('torch_texts_per_second', float('nan')):.0f} in transformers")
    print(json.dumps(rates | {"jax": jax.__version__}))


if __name__ == "__main__":
    app.run(main)
