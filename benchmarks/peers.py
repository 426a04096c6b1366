"""The same model in transformers on torch, given our own weights."""

import importlib.util
import os
import time

import numpy as np


def torch_available() -> bool:
    """Says whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def torch_model(params: dict, config):
    """Returns a transformers Llama with the parameters of `params`, float32, in eval mode."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from flax.traverse_util import flatten_dict

    from memcalib_jax.models.weights.families import PARAMETERS, flat_shapes, tensor_names

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size, num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim, rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.max_positions, tie_word_embeddings=config.tie_embeddings,
        rope_parameters={"rope_theta": config.rope.theta, "rope_type": "default"},
        attn_implementation="sdpa"))
    values = {path: np.asarray(value) for path, value in flatten_dict(params, sep="/").items()}
    state = {}
    for path in flat_shapes(config):
        placement = PARAMETERS[path]
        names = tensor_names(path, config, "hugging_face")
        layers = values[path] if path.startswith("layers/") else values[path][None]
        for name, value in zip(names, layers, strict=True):
            state[name] = torch.from_numpy(np.ascontiguousarray(placement.to_stored(value)))
    model.load_state_dict(state, strict=False)
    return model.eval()


def torch_scores(params, config, prompts, responses, *, repeats: int, rows_at_once: int = 8):
    """Scores dense right-padded rows with all logits; returns seconds a run and the log-probs."""
    import torch

    torch.set_num_threads(os.cpu_count())
    model = torch_model(params, config)

    def run():
        scores = []
        for first in range(0, len(prompts), rows_at_once):
            rows = [list(p) + list(r) for p, r in zip(prompts[first:first + rows_at_once],
                                                      responses[first:first + rows_at_once])]
            size = max(map(len, rows))
            tokens = torch.tensor([row + [0] * (size - len(row)) for row in rows])
            with torch.no_grad():
                logits = torch.log_softmax(model(tokens).logits.float(), -1)
            for row, prompt, response in zip(logits, prompts[first:], responses[first:]):
                places = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
                scores.append(row[places, torch.tensor(list(response))].numpy())
        return scores

    scores = run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken, scores


def torch_gradients(params, config, rows, num_targets: int, *, repeats: int,
                    rows_at_once: int = 4) -> list[float]:
    """Returns the seconds of a gradient of the last tokens' log-probs, with all logits."""
    import torch

    torch.set_num_threads(os.cpu_count())
    model = torch_model(params, config).train()

    def run():
        model.zero_grad()
        for first in range(0, len(rows), rows_at_once):
            tokens = torch.tensor(rows[first:first + rows_at_once])
            log_p = torch.log_softmax(model(tokens).logits[:, :-1].float(), -1)
            chosen = log_p.gather(-1, tokens[:, 1:, None])[:, -num_targets:]
            (-chosen.sum()).backward()

    run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken


def torch_generate(params, config, prompts, group_size: int, max_tokens: int, stop_ids, *,
                   repeats: int) -> tuple[list[float], int]:
    """Samples with `generate`; returns the seconds of each run and the tokens of responses."""
    import torch

    torch.set_num_threads(os.cpu_count())
    model = torch_model(params, config)
    tokens = torch.tensor([prompt for prompt in prompts for _ in range(group_size)])
    pad = 0

    def run():
        with torch.no_grad():
            return model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=True, temperature=1.0,
                top_p=1.0, top_k=0, max_new_tokens=max_tokens, pad_token_id=pad,
                eos_token_id=list(stop_ids) or None)

    taken, counts = [], []
    for _ in range(repeats + 1):
        torch.manual_seed(0)
        start = time.perf_counter()
        responses = run()[:, tokens.shape[1]:].numpy()
        taken.append(time.perf_counter() - start)
        ends = np.isin(responses, list(stop_ids))
        counts.append(int(np.where(ends.any(1), ends.argmax(1) + 1, responses.shape[1]).sum()))
    return taken[1:], counts[-1]
