"""Forward KL from a teacher over its likeliest tokens and one bucket of all others (GKD)."""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from memcalib_jax.models import ModelConfig
from memcalib_jax.models.attention import over_bins
from memcalib_jax.models.layers import head_matrix
from memcalib_jax.models.packed import hidden_states_and_load
from memcalib_jax.scoring.packing import ScoredBatch
from memcalib_jax.training.top_tokens import Buckets, bucket_log_probs, top_ids
from memcalib_jax.training.update import ObjectiveConfig


@struct.dataclass
class TaughtBatch:
    """One micro-batch of GKD: packed responses, and what the teacher thinks at each token.

    Attributes:
      scored: the trees and their response tokens.
      ids: int32 `[bins, M, K]`, the teacher's likeliest tokens.
      teacher: its log-probs of them `[bins, M, K]` and of all others `[bins, M]`, nats.
      mask: bool `[bins, M]`, true at response tokens. Elsewhere all may be anything.
    """

    scored: ScoredBatch
    ids: jax.Array
    teacher: Buckets
    mask: jax.Array


@struct.dataclass
class DivergenceSums:
    """Sums over response tokens, float32 scalars; divide by `tokens` once per optimizer step.

    Attributes:
      loss: forward KL from teacher to student over the buckets, nats; carries the gradient.
      teacher_tail, student_tail: probabilities of the tails.
      tokens: response tokens.
    """

    loss: jax.Array
    teacher_tail: jax.Array
    student_tail: jax.Array
    tokens: jax.Array

    def __add__(self, other: "DivergenceSums") -> "DivergenceSums":
        return jax.tree.map(jnp.add, self, other)

    def averages(self) -> dict[str, float]:
        """Returns the token means under metric names."""
        tokens = max(float(self.tokens), 1.0)
        return {"loss/total": float(self.loss) / tokens,
                "loss/teacher_tail": float(self.teacher_tail) / tokens,
                "loss/student_tail": float(self.student_tail) / tokens}


def forward_kl(teacher: Buckets, student: Buckets, mask: jax.Array) -> DivergenceSums:
    """Sums KL(teacher || student) over K + 1 buckets and the tokens of the mask.

    Per token `sum_k p_k (log p_k - log q_k)` over the teacher's top tokens, and the tail's term
    (the top-k approximation of GKD, E.2, arXiv 2609.24259): a lower bound of the full KL.

    Args:
      teacher: log-probs `[..., K]` and `[...]`, nats; passes no gradient.
      student: the same tokens' log-probs; carries the gradient.
      mask: bool `[...]`. Elsewhere inputs may be anything, and sums and gradients do not see it.
    """
    def together(buckets):
        return jnp.where(mask[..., None], jnp.concatenate(
            [buckets.chosen, buckets.tail[..., None]], axis=-1), 0.0)

    p, q = jax.lax.stop_gradient(together(teacher)), together(student)
    return DivergenceSums(
        loss=jnp.sum(jnp.exp(p) * (p - q)),
        teacher_tail=jnp.sum(jnp.where(mask, jnp.exp(p[..., -1]), 0.0)),
        student_tail=jnp.sum(jnp.where(mask, jnp.exp(q[..., -1]), 0.0)),
        tokens=jnp.sum(mask.astype(jnp.float32)))


def divergence_sums(params: dict, config: ModelConfig, batch: TaughtBatch,
                    objective: ObjectiveConfig) -> DivergenceSums:
    """Sums the forward KL from the teacher over a micro-batch; see `forward_kl`."""
    hidden, _ = hidden_states_and_load(params, config, batch.scored.packed,
                                       remat=objective.remat)
    head = head_matrix(params)

    def one_bin(hidden, sources, ids):
        return bucket_log_probs(hidden[sources], head, ids, objective.temperature)

    student = over_bins(one_bin, hidden, batch.scored.sources, batch.ids)
    return forward_kl(batch.teacher, student, batch.mask)


@functools.partial(jax.jit, static_argnames=("config", "k"))
def teacher_buckets(params: dict, config: ModelConfig, batch: ScoredBatch, k: int,
                    temperature: jax.Array | float = 1.0) -> tuple[jax.Array, Buckets]:
    """Returns the likeliest tokens at each response token, and their log-probs.

    Returns:
      int32 `[bins, M, k]` ids, the likeliest first, and float32 buckets in nats.
    """
    hidden, _ = hidden_states_and_load(params, config, batch.packed)
    head = head_matrix(params)

    def one_bin(hidden, sources):
        rows = hidden[sources]
        ids = top_ids(rows, head, k)
        return ids, bucket_log_probs(rows, head, ids, temperature)

    return over_bins(one_bin, hidden, batch.sources)
