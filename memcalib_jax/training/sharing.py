"""Checks the shared counterfactual pass of a run against dense rows."""

import numpy as np

from memcalib_jax.scoring import score_dense
from memcalib_jax.training.advantages import Counterfactuals
from memcalib_jax.training.rollouts import Policy

# Root mean square difference in nats: of rounding in float32, and against the noise that moving
# all positions makes, which is rounding in whatever dtype the products have.
FLOAT32_ROUNDING = 1e-4
TIMES_NOISE = 3.0


class SharingMismatch(RuntimeError):
    """Sharing prompts changed log-probs by more than rounding does."""


def check_sharing(policy: Policy, scores: Counterfactuals, temperature: float) -> float:
    """Scores every pair again as a row of its own and compares.

    Returns:
      The root mean square difference of the log-probs of full and ablated prompts, in nats.

    Raises:
      SharingMismatch: it exceeds both `FLOAT32_ROUNDING` and `TIMES_NOISE` times the noise.
    """
    prompts, responses, shared = [], [], []
    for group, rows in zip(scores.groups, scores.log_probs, strict=True):
        for (prompt, response), row in zip(group.pairs, rows, strict=True):
            if not group.position_offsets[prompt]:  # a shifted twin is no plain row
                prompts.append(group.prompts[prompt])
                responses.append(group.responses[response])
                shared.append(row)
    dense = score_dense(policy.params, policy.config, prompts, responses, temperature=temperature)
    difference = np.concatenate(shared) - np.concatenate(dense)
    size = float(np.sqrt(np.mean(np.square(difference))))
    allowed = max(FLOAT32_ROUNDING, TIMES_NOISE * scores.noise)
    if not size <= allowed:
        raise SharingMismatch(
            f"the shared counterfactual pass differs from dense rows by {size:.2e} nats (root mean "
            f"square over {len(shared)} pairs; rounding allows {allowed:.2e}): its scores would be "
            "wrong on this device. Please report it with the model and the device; nothing of this "
            "step was used")
    return size
