"""The same models in transformers on torch: the reference of parity tests and golden values."""

import numpy as np
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

# More threads than free cores slow torch down several times.
torch.set_num_threads(1)


def from_tensors(config, tensors: dict):
    """Returns a transformers model of `config` with exactly the given weights."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    state = {key: torch.tensor(value) for key, value in tensors.items()}
    different = state.keys() ^ model.state_dict().keys()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert different == tied, different
    model.load_state_dict(state, strict=not tied)
    return model.eval()


def from_gguf(path, family: str, num_layers: int):
    """Returns a GGUF file as transformers reads it, in float32."""
    with torch.device("meta"):  # only for its tensors' names
        unfilled = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(family, num_hidden_layers=num_layers))
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=unfilled)
    return from_tensors(transformers.AutoConfig.for_model(**read["config"]),
                        {key: value.numpy() for key, value in read["tensors"].items()})


def run(model, tokens: np.ndarray, lengths: np.ndarray):
    """Returns the logits of right-padded rows and the summed log-prob of all but first tokens."""
    tokens, lengths = torch.tensor(tokens).long(), torch.tensor(lengths)
    place = torch.arange(tokens.shape[1])[None]
    logits = model(tokens, attention_mask=(place < lengths[:, None]).long()).logits
    log_probs = torch.log_softmax(logits[:, :-1], dim=-1)
    chosen = torch.gather(log_probs, 2, tokens[:, 1:, None])[..., 0]
    return logits, chosen[place[:, 1:] < lengths[:, None]].sum()
