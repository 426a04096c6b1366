"""Evaluation of memory use."""

from memcalib_jax.evaluation.metrics import calibration_metrics

__all__ = ["calibration_metrics"]
