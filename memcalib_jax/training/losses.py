"""The clipped policy objective with a KL penalty, as sums over tokens."""

import jax
import jax.numpy as jnp
from flax import struct

# A log-ratio beyond this has nothing more to say, and its exponential could overflow.
MAX_LOG_RATIO = 20.0


@struct.dataclass
class ObjectiveSums:
    """Sums over valid response tokens; divide by `tokens` once per optimizer step.

    All float32 scalars. `loss` is the only one that carries a gradient.

    Attributes:
      loss: minus the clipped objective plus `kl_weight` times the KL penalty.
      policy: minus the clipped objective alone.
      kl: k3 estimates of KL(policy || reference), nats.
      clipped: tokens whose ratio was cut by the clip.
      log_ratio: log pi - log pi_old, nats.
      max_ratio_error: largest |ratio - 1| (a maximum, not a sum).
      entropy: entropies of the next-token distributions, nats.
      tokens: valid response tokens.
    """

    loss: jax.Array
    policy: jax.Array
    kl: jax.Array
    clipped: jax.Array
    log_ratio: jax.Array
    max_ratio_error: jax.Array
    entropy: jax.Array
    tokens: jax.Array

    def __add__(self, other: "ObjectiveSums") -> "ObjectiveSums":
        return added(self, other)

    def averages(self) -> dict[str, float]:
        """Returns the token means under metric names, and the largest ratio error."""
        tokens = max(float(self.tokens), 1.0)
        return {
            "loss/total": float(self.loss) / tokens,
            "loss/policy": float(self.policy) / tokens,
            "loss/kl": float(self.kl) / tokens,
            "loss/clip_fraction": float(self.clipped) / tokens,
            "loss/log_ratio": float(self.log_ratio) / tokens,
            "loss/max_ratio_error": float(self.max_ratio_error),
            "loss/entropy": float(self.entropy) / tokens,
        }


def added(first, second):
    """Returns the sums of two parts of one kind; of `max_ratio_error` the larger."""
    total = jax.tree.map(jnp.add, first, second)
    return total.replace(max_ratio_error=jnp.maximum(first.max_ratio_error, second.max_ratio_error))


def policy_objective(log_probs: jax.Array, old_log_probs: jax.Array,
                     reference_log_probs: jax.Array, advantages: jax.Array, mask: jax.Array,
                     entropy: jax.Array, *, clip: float, kl_weight: float) -> ObjectiveSums:
    """Sums minus Eq. (2), arXiv 2609.24259, over the tokens of the mask.

    Per token, with ratio r = exp(log pi - log pi_old), the loss is
    `-min(r A, clip(r, 1 - clip, 1 + clip) A) + kl_weight (exp(u) - u - 1)` where
    u = log pi_ref - log pi (the k3 estimate of the KL to the reference).

    Args:
      log_probs: float `[...]`, log pi of the sampled tokens in nats; carries the gradient.
      old_log_probs, reference_log_probs: float `[...]`, nats.
      advantages: float `[...]`, token advantages.
      mask: bool `[...]`, true at tokens of valid responses. Elsewhere every input may be
        anything, NaN included, and neither sums nor gradients see it.
      entropy: float `[...]`, nats; only summed.
      clip: radius of the ratio's clip.
      kl_weight: coefficient of the penalty.
    """
    def valid(values):
        return jnp.where(mask, values, 0.0)

    log_probs, entropy = valid(log_probs), valid(entropy)
    old, reference = (jax.lax.stop_gradient(valid(x))
                      for x in (old_log_probs, reference_log_probs))
    advantages = jax.lax.stop_gradient(valid(advantages))

    log_ratio = jnp.clip(log_probs - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    unclipped = ratio * advantages
    clipped = jnp.clip(ratio, 1.0 - clip, 1.0 + clip) * advantages
    policy = -jnp.minimum(unclipped, clipped)
    to_reference = jnp.clip(reference - log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    kl = jnp.expm1(to_reference) - to_reference
    return ObjectiveSums(
        loss=jnp.sum(valid(policy + kl_weight * kl)),
        policy=jnp.sum(valid(policy)),
        kl=jnp.sum(valid(kl)),
        clipped=jnp.sum(valid((clipped < unclipped).astype(jnp.float32))),
        log_ratio=jnp.sum(valid(log_ratio)),
        max_ratio_error=jnp.max(valid(jnp.abs(ratio - 1.0))),
        entropy=jnp.sum(entropy),
        tokens=jnp.sum(mask.astype(jnp.float32)))
