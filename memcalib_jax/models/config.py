"""The shape of a decoder: everything a forward needs besides its parameters."""

import dataclasses

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A dense decoder with grouped-query attention, rotary positions and SwiGLU.

    Hashable, so that it can be a static argument of a jitted function.

    Attributes:
      family: one of `FAMILIES`; decides tensor names on disk, not the forward.
      vocab_size: rows of the embedding (may exceed the tokenizer's vocabulary).
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_layers, num_heads, num_kv_heads, head_dim: as named; `head_dim` need not be
        `hidden_size / num_heads`.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon under the root of every RMS norm.
      attention_bias: q, k and v have biases (Qwen2, Qwen2.5).
      qk_norm: q and k are RMS-normalized per head before rotation (Qwen3).
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
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    attention_bias: bool = False
    qk_norm: bool = False
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
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for rotary positions")

    def parameter_shapes(self) -> dict:
        """Returns the tree of parameter shapes; layers are stacked on a leading axis.

        The tree that every forward takes, every loader fills and every writer empties:
        `embed [V, D]`, `layers/...` with a leading `num_layers` axis, `final_norm [D]` and,
        where the head is its own matrix, `head [V, D]`. Projections are stored input axes
        first: `q [L, D, H, d]`, `o [L, H, d, D]`, `gate [L, D, F]`, `down [L, F, D]`.
        """
        l, d, f = self.num_layers, self.hidden_size, self.intermediate_size
        h, k, e = self.num_heads, self.num_kv_heads, self.head_dim
        layers = {
            "attention_norm": (l, d), "mlp_norm": (l, d),
            "q": (l, d, h, e), "k": (l, d, k, e), "v": (l, d, k, e), "o": (l, h, e, d),
            "gate": (l, d, f), "up": (l, d, f), "down": (l, f, d),
        }
        if self.attention_bias:
            layers |= {"q_bias": (l, h, e), "k_bias": (l, k, e), "v_bias": (l, k, e)}
        if self.qk_norm:
            layers |= {"q_norm": (l, e), "k_norm": (l, e)}
        shapes = {"embed": (self.vocab_size, d), "layers": layers, "final_norm": (d,)}
        if not self.tie_embeddings:
            shapes["head"] = (self.vocab_size, d)
        return shapes
