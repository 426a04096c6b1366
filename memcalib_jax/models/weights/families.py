"""Model families: where a checkpoint keeps each setting and each parameter.

One table serves both directions and both file formats: names are `(hugging_face, gguf)` pairs,
and a `Placement` turns a stored tensor into a parameter and back.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from flax.traverse_util import flatten_dict, unflatten_dict

from memcalib_jax.models.config import ModelConfig


class Names(NamedTuple):
    """What one thing is called in each file format."""

    hugging_face: str
    gguf: str


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets one family apart.

    Attributes:
      architecture: the class that the config.json of a text model names.
      model_type: what that config.json, or the text part of a larger one, calls itself.
      wrapper: the class of a model of images and text whose text part is of this family; its
        config.json describes that part under text_config.
      not_text: beginnings of the names of tensors that are no part of the text model: vision
        towers, heads that predict several tokens.
      gguf: the architecture that a GGUF file names; None where it cannot be read from one.
      attention_bias: q, k and v have biases.
      qk_norm: q and k are normalized per head.
      head_dim: size of a head where a checkpoint leaves it out; None for hidden / heads.
      partial_rotary_factor: share of a head that is rotated where a checkpoint leaves it out;
        None where a head is always rotated whole.
      experts: every MLP is a mixture of experts.
      normalized_experts: the weights of a token's experts sum to 1 whatever config.json says.
      query_scale: queries may grow with their position.
      hybrid: delta net layers among attention layers; attention is gated, norms zero-centred.
      interleaved_in_gguf: GGUF stores the rows of q and k in rotary pairs (2i, 2i + 1) instead
        of halves.
    """

    architecture: str
    model_type: str
    wrapper: str | None = None
    not_text: tuple[str, ...] = ()
    gguf: str | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    partial_rotary_factor: float | None = None
    experts: bool = False
    normalized_experts: bool = False
    query_scale: bool = False
    hybrid: bool = False
    interleaved_in_gguf: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", gguf="llama", interleaved_in_gguf=True),
    "ministral3": Family(
        "Ministral3ForCausalLM", "ministral3", wrapper="Mistral3ForConditionalGeneration",
        not_text=("vision_tower.", "multi_modal_projector.", "model.vision_tower.",
                  "model.multi_modal_projector."),
        head_dim=128, query_scale=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", gguf="qwen2", attention_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", gguf="qwen3", qk_norm=True, head_dim=128),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", qk_norm=True, experts=True),
    "qwen3_5": Family(
        "Qwen3_5ForCausalLM", "qwen3_5_text", wrapper="Qwen3_5ForConditionalGeneration",
        not_text=("model.visual.", "mtp."), qk_norm=True, head_dim=256,
        partial_rotary_factor=0.25, hybrid=True),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text",
        wrapper="Qwen3_5MoeForConditionalGeneration", not_text=("model.visual.", "mtp."),
        qk_norm=True, head_dim=256, partial_rotary_factor=0.25, experts=True,
        normalized_experts=True, hybrid=True),
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
}
# The same of its Experts in a config.json, where a `shared_size` of 0 may be left out, and what
# stands there for `intermediate_size`.
EXPERT_SETTINGS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "shared_size": "shared_expert_intermediate_size",
}
EXPERT_WIDTH = "moe_intermediate_size"
# The same of its DeltaNet, and what kinds of layers are called.
DELTA_SETTINGS = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_size": "linear_conv_kernel_dim",
}
LAYER_KINDS = {"attention": "full_attention", "delta": "linear_attention"}


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a parameter lies in a checkpoint, and how a stored tensor is laid out.

    Attributes:
      names: its tensor's name; "{}" stands for the layer of a stacked parameter, a second one
        for the expert.
      input_axes: how many leading axes of the parameter (without the stacked ones) are inputs.
        A projection is stored as a matrix `[outputs, inputs]`, a bias, without input axes, as
        a vector `[outputs]`. None: stored with the parameter's own shape.
      depthwise: a convolution `[taps, channels]`, stored as `[channels, 1, taps]`.
      axes: logical names of the parameter's axes, the stacked ones first; rules say by them what
        is split over devices. An adapter, which is small, has none.
    """

    names: Names
    input_axes: int | None = None
    depthwise: bool = False
    axes: tuple[str, ...] = ()

    @property
    def stacked_axes(self) -> int:
        """How many leading axes of the parameter run over tensors: layers, then experts."""
        return self.names.hugging_face.count("{}")

    def tensor_names(self, file_format: str, layers: Iterable[int],
                     num_experts: int = 0) -> list[str]:
        """Lists the stored tensors of this parameter in order.

        Args:
          file_format: a field of `Names`.
          layers: the model's layers that it is stacked over, see `layer_numbers`.
          num_experts: experts of a layer, if any.
        """
        stacked = (layers, range(num_experts))[:self.stacked_axes]
        name = getattr(self.names, file_format)
        return [name.format(*numbers) for numbers in itertools.product(*stacked)]

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape on disk of a parameter of `shape` (without stacked axes)."""
        if self.depthwise:
            return shape[1], 1, shape[0]
        if self.input_axes is None:
            return tuple(shape)
        outputs = (math.prod(shape[self.input_axes:]),)
        return outputs + ((math.prod(shape[:self.input_axes]),) if self.input_axes else ())

    def to_parameter(self, tensor, shape: tuple[int, ...]):
        """Returns a stored tensor as a parameter of `shape` (without stacked axes)."""
        return (tensor.T if self._transposed else tensor).reshape(shape)

    def covering(self, shape: tuple[int, ...], index: tuple[slice, ...]):
        """Finds what to read of a stored tensor for `parameter[index]`.

        Args:
          shape: the parameter's (without stacked axes).
          index: a slice with bounds for each of its axes.

        Returns:
          The slices of the stored tensor that hold it, cut along the first input axis and the
          first output axis; the shape `to_parameter` takes for them; and what of its result is
          `parameter[index]`.
        """
        if self.depthwise:
            taps, channels = index
            sizes = tuple(part.stop - part.start for part in index)
            return (channels, slice(0, 1), taps), sizes, ...
        if self.input_axes is None:
            return index, tuple(part.stop - part.start for part in index), ...
        stored, sizes, wanted = [], [], []
        for group in (slice(0, self.input_axes), slice(self.input_axes, None)):
            first, *others = index[group] or (slice(0, 1),)
            inner = shape[group][1:]
            width = math.prod(inner)
            stored.append(slice(first.start * width, first.stop * width))
            sizes += [first.stop - first.start, *inner] if index[group] else []
            wanted += [slice(None), *others] if index[group] else []
        return tuple(stored[::-1] if self.input_axes else stored[1:]), tuple(sizes), tuple(wanted)

    def to_stored(self, parameter):
        """Returns a parameter (without stacked axes) as it is stored."""
        if self._transposed:
            return parameter.reshape(self.stored_shape(parameter.shape)[::-1]).T
        return parameter.reshape(self.stored_shape(parameter.shape))

    @property
    def _transposed(self):
        return self.depthwise or bool(self.input_axes)


def _layer(axes: str, hugging_face: str, gguf: str = "", input_axes: int | None = None,
           depthwise: bool = False) -> Placement:
    names = Names("model.layers.{}." + hugging_face, "blk.{}." + gguf)
    return Placement(names, input_axes, depthwise, ("layers", *axes.split()))


_MLP = {
    "mlp_norm": _layer("norm", "post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate": _layer("embed mlp", "mlp.gate_proj.weight", "ffn_gate.weight", input_axes=1),
    "up": _layer("embed mlp", "mlp.up_proj.weight", "ffn_up.weight", input_axes=1),
    "down": _layer("mlp embed", "mlp.down_proj.weight", "ffn_down.weight", input_axes=1),
    "router": _layer("embed router", "mlp.gate.weight", input_axes=1),
    "expert_gate": _layer("expert embed mlp", "mlp.experts.{}.gate_proj.weight", input_axes=1),
    "expert_up": _layer("expert embed mlp", "mlp.experts.{}.up_proj.weight", input_axes=1),
    "expert_down": _layer("expert mlp embed", "mlp.experts.{}.down_proj.weight", input_axes=1),
    "shared_gate": _layer("embed mlp", "mlp.shared_expert.gate_proj.weight", input_axes=1),
    "shared_up": _layer("embed mlp", "mlp.shared_expert.up_proj.weight", input_axes=1),
    "shared_down": _layer("mlp embed", "mlp.shared_expert.down_proj.weight", input_axes=1),
    "shared_router": _layer("embed", "mlp.shared_expert_gate.weight", input_axes=1),
}
_ATTENTION = {
    "attention_norm": _layer("norm", "input_layernorm.weight", "attn_norm.weight"),
    "q": _layer("embed heads head", "self_attn.q_proj.weight", "attn_q.weight", input_axes=1),
    "k": _layer("embed kv_heads head", "self_attn.k_proj.weight", "attn_k.weight", input_axes=1),
    "v": _layer("embed kv_heads head", "self_attn.v_proj.weight", "attn_v.weight", input_axes=1),
    "q_bias": _layer("heads head", "self_attn.q_proj.bias", "attn_q.bias", input_axes=0),
    "k_bias": _layer("kv_heads head", "self_attn.k_proj.bias", "attn_k.bias", input_axes=0),
    "v_bias": _layer("kv_heads head", "self_attn.v_proj.bias", "attn_v.bias", input_axes=0),
    "q_norm": _layer("norm", "self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": _layer("norm", "self_attn.k_norm.weight", "attn_k_norm.weight"),
    "o": _layer("heads head embed", "self_attn.o_proj.weight", "attn_output.weight", input_axes=2),
}
_DELTA = {
    "attention_norm": _layer("norm", "input_layernorm.weight"),
    "qkv": _layer("embed channels", "linear_attn.in_proj_qkv.weight", input_axes=1),
    "conv": _layer("taps channels", "linear_attn.conv1d.weight", depthwise=True),
    "output_gate": _layer("embed heads head", "linear_attn.in_proj_z.weight", input_axes=1),
    "beta": _layer("embed heads", "linear_attn.in_proj_b.weight", input_axes=1),
    "decay": _layer("embed heads", "linear_attn.in_proj_a.weight", input_axes=1),
    "decay_bias": _layer("heads", "linear_attn.dt_bias"),
    "log_rate": _layer("heads", "linear_attn.A_log"),
    "value_norm": _layer("norm", "linear_attn.norm.weight"),
    "o": _layer("heads head embed", "linear_attn.out_proj.weight", input_axes=2),
}

# Keys are paths in the tree of `ModelConfig.parameter_shapes()`.
PARAMETERS = {
    "embed": Placement(Names("model.embed_tokens.weight", "token_embd.weight"),
                       axes=("vocab", "embed")),
    **{f"layers/{name}": placement for name, placement in (_ATTENTION | _MLP).items()},
    **{f"delta_layers/{name}": placement for name, placement in (_DELTA | _MLP).items()},
    "final_norm": Placement(Names("model.norm.weight", "output_norm.weight"), axes=("norm",)),
    "head": Placement(Names("lm_head.weight", "output.weight"), axes=("vocab", "embed")),
}


def flat_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the parameter shapes of `config` by their paths in the tree."""
    return flatten_dict(config.parameter_shapes(), sep="/")


def parameter_axes(config: ModelConfig) -> dict:
    """Returns the logical names of every parameter's axes: a tree like `parameter_shapes()`."""
    return unflatten_dict({path: PARAMETERS[path].axes for path in flat_shapes(config)}, sep="/")


def layer_numbers(path: str, config: ModelConfig) -> list[int]:
    """Returns which layers of the model the parameter at `path` is stacked over."""
    kind = "delta" if path.startswith("delta_layers/") else "attention"
    return [number for number, other in enumerate(config.layer_kinds) if other == kind]


def tensor_names(path: str, config: ModelConfig, file_format: str) -> list[str]:
    """Lists the stored tensors of the parameter at `path`, in the order of its stacked axes."""
    return PARAMETERS[path].tensor_names(
        file_format, layer_numbers(path, config), config.experts.count if config.experts else 0)
