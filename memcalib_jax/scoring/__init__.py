"""Log-probabilities of given responses under given prompts."""

from memcalib_jax.scoring.counterfactual import (
    ScoringGroup,
    score_counterfactuals,
)
from memcalib_jax.scoring.dense import score_dense

__all__ = ["ScoringGroup", "score_counterfactuals", "score_dense"]
