"""Model families: where a checkpoint keeps each setting and each parameter.

One table serves both directions and both file formats: names are `(hugging_face, gguf)` pairs,
and a `Placement` turns a stored tensor into a parameter and back.
"""

import dataclasses
import math
from typing import NamedTuple

from flax.traverse_util import flatten_dict

from memcalib_jax.models.config import ModelConfig


class Names(NamedTuple):
    """What one thing is called in each file format."""

    hugging_face: str
    gguf: str


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets one family apart.

    Attributes:
      architecture: the class a config.json names; a GGUF file names the family itself.
      attention_bias: q, k and v have biases.
      qk_norm: q and k are normalized per head.
      head_dim: size of a head where a checkpoint leaves it out; None for hidden / heads.
      interleaved_in_gguf: GGUF stores the rows of q and k in rotary pairs (2i, 2i + 1) instead
        of halves.
    """

    architecture: str
    attention_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    interleaved_in_gguf: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", interleaved_in_gguf=True),
    "qwen2": Family("Qwen2ForCausalLM", attention_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
}

# Fields of ModelConfig that a checkpoint states as one number. GGUF keys follow "<family>.".
SETTINGS = {
    "vocab_size": Names("vocab_size", "vocab_size"),
    "hidden_size": Names("hidden_size", "embedding_length"),
    "intermediate_size": Names("intermediate_size", "feed_forward_length"),
    "num_layers": Names("num_hidden_layers", "block_count"),
    "num_heads": Names("num_attention_heads", "attention.head_count"),
    "num_kv_heads": Names("num_key_value_heads", "attention.head_count_kv"),
    "head_dim": Names("head_dim", "attention.key_length"),
    "norm_eps": Names("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    "max_positions": Names("max_position_embeddings", "context_length"),
    "rope_theta": Names("rope_theta", "rope.freq_base"),
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a parameter lies in a checkpoint, and how a stored tensor is laid out.

    Attributes:
      names: its tensor's name; "{}" stands for the layer of a stacked parameter.
      input_axes: how many leading axes of the parameter (without the layer axis) are inputs.
        A projection is stored as a matrix `[outputs, inputs]`, a bias, without input axes, as
        a vector `[outputs]`. None: stored with the parameter's own shape.
    """

    names: Names
    input_axes: int | None = None

    def tensor_names(self, file_format: str, num_layers: int) -> list[str]:
        """Lists the stored tensors of this parameter, in layer order."""
        name = getattr(self.names, file_format)
        return [name.format(i) for i in range(num_layers)] if "{}" in name else [name]

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape on disk of a parameter of `shape` (without the layer axis)."""
        if self.input_axes is None:
            return tuple(shape)
        outputs = (math.prod(shape[self.input_axes:]),)
        return outputs + ((math.prod(shape[:self.input_axes]),) if self.input_axes else ())

    def to_parameter(self, tensor, shape: tuple[int, ...]):
        """Returns a stored tensor as a parameter of `shape` (without the layer axis)."""
        return (tensor.T if self.input_axes else tensor).reshape(shape)

    def to_stored(self, parameter):
        """Returns a parameter (without the layer axis) as it is stored."""
        if self.input_axes:
            return parameter.reshape(self.stored_shape(parameter.shape)[::-1]).T
        return parameter.reshape(self.stored_shape(parameter.shape))


def _layer(hugging_face: str, gguf: str, input_axes: int | None = None) -> Placement:
    return Placement(Names("model.layers.{}." + hugging_face, "blk.{}." + gguf), input_axes)


# Keys are paths in the tree of `ModelConfig.parameter_shapes()`.
PARAMETERS = {
    "embed": Placement(Names("model.embed_tokens.weight", "token_embd.weight")),
    "layers/attention_norm": _layer("input_layernorm.weight", "attn_norm.weight"),
    "layers/q": _layer("self_attn.q_proj.weight", "attn_q.weight", input_axes=1),
    "layers/k": _layer("self_attn.k_proj.weight", "attn_k.weight", input_axes=1),
    "layers/v": _layer("self_attn.v_proj.weight", "attn_v.weight", input_axes=1),
    "layers/q_bias": _layer("self_attn.q_proj.bias", "attn_q.bias", input_axes=0),
    "layers/k_bias": _layer("self_attn.k_proj.bias", "attn_k.bias", input_axes=0),
    "layers/v_bias": _layer("self_attn.v_proj.bias", "attn_v.bias", input_axes=0),
    "layers/q_norm": _layer("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "layers/k_norm": _layer("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "layers/o": _layer("self_attn.o_proj.weight", "attn_output.weight", input_axes=2),
    "layers/mlp_norm": _layer("post_attention_layernorm.weight", "ffn_norm.weight"),
    "layers/gate": _layer("mlp.gate_proj.weight", "ffn_gate.weight", input_axes=1),
    "layers/up": _layer("mlp.up_proj.weight", "ffn_up.weight", input_axes=1),
    "layers/down": _layer("mlp.down_proj.weight", "ffn_down.weight", input_axes=1),
    "final_norm": Placement(Names("model.norm.weight", "output_norm.weight")),
    "head": Placement(Names("lm_head.weight", "output.weight")),
}


def flat_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the parameter shapes of `config` by their paths in the tree."""
    return flatten_dict(config.parameter_shapes(), sep="/")
