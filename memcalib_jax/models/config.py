"""The shape of a decoder: everything a forward needs besides its parameters."""

import dataclasses

from memcalib_jax.models.rope import QueryScale, Rope

FAMILIES = ("llama", "ministral3", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of every layer's MLP.

    Attributes:
      count: routed experts of a layer.
      per_token: experts that each token is sent to.
      normalize: the weights of a token's experts sum to 1.
      shared_size: width of the expert that every token passes, behind a sigmoid gate; 0 for none.
    """

    count: int
    per_token: int
    normalize: bool = True
    shared_size: int = 0

    def __post_init__(self):
        if not 0 < self.per_token <= self.count:
            raise ValueError(f"experts per token ({self.per_token}) must be from 1 to the number "
                             f"of experts ({self.count})")


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """Gated delta net layers among those of softmax attention.

    Attributes:
      pattern: kinds of the layers of one period, "delta" or "attention", repeated over the depth.
      num_key_heads, num_value_heads: heads of q and k, and of v; the latter a multiple.
      key_dim, value_dim: sizes of a head.
      conv_size: taps of the causal convolution over q, k and v.
    """

    pattern: tuple[str, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int

    def __post_init__(self):
        if set(self.pattern) != {"delta", "attention"}:
            raise ValueError(f"a period of layers must hold both delta and attention layers, not "
                             f"{self.pattern}")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"delta net value heads ({self.num_value_heads}) must be a multiple of its key "
                f"heads ({self.num_key_heads})")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder with grouped-query attention, rotary positions and SwiGLU.

    Hashable, so that it can be a static argument of a jitted function.

    Attributes:
      family: one of `FAMILIES`; decides tensor names on disk, not the forward.
      vocab_size: rows of the embedding (may exceed the tokenizer's vocabulary).
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP, or of each routed expert.
      num_layers, num_heads, num_kv_heads, head_dim: as named; `head_dim` need not be
        `hidden_size / num_heads`.
      rope: rotary positions.
      query_scale: how queries grow with their position, if they do (Ministral 3).
      norm_eps: epsilon under the root of every RMS norm.
      attention_bias: q, k and v have biases (Qwen2, Qwen2.5).
      qk_norm: q and k are RMS-normalized per head before rotation (Qwen3).
      attention_gate: each head's output is multiplied by a sigmoid gate that lies behind q in the
        same projection (Qwen3.5).
      zero_centred_norms: norms multiply by 1 + their scale (Qwen3.5).
      experts: the mixture that stands for every MLP, if any.
      delta: the gated delta net layers among the others, if any.
      tie_embeddings: the head is the embedding matrix; otherwise it has its own.
      max_positions: longest sequence the checkpoint was made for.
      eos_ids: every token id that ends a response (generation config and tokenizer).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope = Rope()
    query_scale: QueryScale | None = None
    norm_eps: float = 1e-5
    attention_bias: bool = False
    qk_norm: bool = False
    attention_gate: bool = False
    zero_centred_norms: bool = False
    experts: Experts | None = None
    delta: DeltaNet | None = None
    tie_embeddings: bool = True
    max_positions: int = 8192
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"unknown model family {self.family!r}; known: {', '.join(FAMILIES)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})")
        rotated = self.rope.rotated_dims(self.head_dim)
        if rotated % 2 or not 0 < rotated <= self.head_dim:
            raise ValueError(f"the rotated part ({rotated}) of head_dim ({self.head_dim}) must be "
                             "even and between 2 and head_dim")
        if self.num_layers % len(self.layer_pattern):
            raise ValueError(f"num_layers ({self.num_layers}) must be a multiple of the period of "
                             f"layer kinds ({len(self.layer_pattern)})")

    @property
    def layer_pattern(self) -> tuple[str, ...]:
        """Kinds of the layers of one period: "attention" or "delta"."""
        return self.delta.pattern if self.delta else ("attention",)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer, "attention" or "delta"."""
        return self.layer_pattern * (self.num_layers // len(self.layer_pattern))

    def parameter_shapes(self) -> dict:
        """Returns the tree of parameter shapes; layers of a kind are stacked on a leading axis.

        The tree that every forward takes, every loader fills and every writer empties:
        `embed [V, D]`, `layers/...` with a leading axis over the attention layers,
        `delta_layers/...` with one over the delta net layers where there are any,
        `final_norm [D]` and, where the head is its own matrix, `head [V, D]`. Projections are
        stored input axes first: `q [L, D, H, d]` (`[L, D, H, 2 d]` with gates behind each head),
        `o [L, H, d, D]`, `gate [L, D, F]`, `down [L, F, D]`, `expert_gate [L, E, D, F]`.
        """
        shapes = {"embed": (self.vocab_size, self.hidden_size), "final_norm": (self.hidden_size,)}
        for kind, name, layer in (("attention", "layers", self._attention_shapes),
                                  ("delta", "delta_layers", self._delta_shapes)):
            count = self.layer_kinds.count(kind)
            if count:
                shapes[name] = {key: (count, *shape)
                                for key, shape in (layer() | self._mlp_shapes()).items()}
        if not self.tie_embeddings:
            shapes["head"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _attention_shapes(self):
        d, h, k, e = self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim
        q = 2 * e if self.attention_gate else e
        shapes = {"attention_norm": (d,), "q": (d, h, q), "k": (d, k, e), "v": (d, k, e),
                  "o": (h, e, d)}
        if self.attention_bias:
            shapes |= {"q_bias": (h, q), "k_bias": (k, e), "v_bias": (k, e)}
        if self.qk_norm:
            shapes |= {"q_norm": (e,), "k_norm": (e,)}
        return shapes

    def _delta_shapes(self):
        d, net = self.hidden_size, self.delta
        h, v = net.num_value_heads, net.value_dim
        channels = 2 * net.num_key_heads * net.key_dim + h * v
        return {"attention_norm": (d,), "qkv": (d, channels), "conv": (net.conv_size, channels),
                "output_gate": (d, h, v), "beta": (d, h), "decay": (d, h), "decay_bias": (h,),
                "log_rate": (h,), "value_norm": (v,), "o": (h, v, d)}

    def _mlp_shapes(self):
        d, f, experts = self.hidden_size, self.intermediate_size, self.experts
        if not experts:
            return {"mlp_norm": (d,), "gate": (d, f), "up": (d, f), "down": (f, d)}
        n, s = experts.count, experts.shared_size
        shapes = {"mlp_norm": (d,), "router": (d, n), "expert_gate": (n, d, f),
                  "expert_up": (n, d, f), "expert_down": (n, f, d)}
        if s:
            shapes |= {"shared_gate": (d, s), "shared_up": (d, s), "shared_down": (s, d),
                       "shared_router": (d,)}
        return shapes
