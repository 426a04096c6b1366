"""Sampling many responses to each prompt, with their log-probs."""

from memcalib_jax.sampling.sampler import Sample, sample

__all__ = ["Sample", "sample"]
