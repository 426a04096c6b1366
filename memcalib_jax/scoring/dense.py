"""Scores every (prompt, response) pair as a plain row of its own: the reference."""

from collections.abc import Sequence

import jax
import numpy as np

from memcalib_jax.models.config import ModelConfig
from memcalib_jax.models.packed import plain_rows
from memcalib_jax.scoring.counterfactual import (
    DEFAULT_BIN_TOKENS,
    check_temperature,
    score_batch,
)
from memcalib_jax.scoring.packing import ScoredBatch, bucket


def score_dense(params: dict, config: ModelConfig, prompts: Sequence[Sequence[int]],
                responses: Sequence[Sequence[int]], *, temperature: float = 1.0,
                batch_tokens: int = DEFAULT_BIN_TOKENS) -> list[np.ndarray]:
    """Scores response i after prompt i, sharing nothing.

    Args:
      params, config: the model.
      prompts, responses: token ids, as many prompts as responses, none empty.
      temperature: positive; log-probs are of the distribution at this temperature.
      batch_tokens: tokens of one device call, padding included.

    Returns:
      One float32 array of the response's length each, in nats.

    Raises:
      ValueError: differing numbers, an empty prompt or response, temperature not positive.
    """
    check_temperature(temperature)
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts for {len(responses)} responses")
    for index, (prompt, response) in enumerate(zip(prompts, responses)):
        if not len(prompt) or not len(response):
            raise ValueError(f"pair {index}: prompt and response must not be empty")
    if not len(prompts):
        return []
    size = bucket(max(len(p) + len(r) for p, r in zip(prompts, responses)), 64)
    width = bucket(max(len(response) for response in responses), 16)
    rows = max(1, min(batch_tokens // size, len(prompts)))
    values = [
        score_batch(params, config, _rows(prompts[i:i + rows], responses[i:i + rows],
                                          (rows, size, width)), temperature)[0]
        for i in range(0, len(prompts), rows)]
    values = np.concatenate(jax.device_get(values))
    return [row[:len(response)] for row, response in zip(values, responses)]


def _rows(prompts, responses, shape) -> ScoredBatch:
    count, size, width = shape
    tokens = np.zeros((count, size), np.int32)
    targets = np.zeros((count, width), np.int32)
    sources = np.zeros_like(targets)
    lengths, counts = np.zeros(count, np.int32), np.zeros(count, np.int32)
    for row, (prompt, response) in enumerate(zip(prompts, responses)):
        counts[row] = len(response)
        lengths[row] = len(prompt) + len(response)
        tokens[row, :lengths[row]] = np.concatenate([prompt, response])
        targets[row, :counts[row]] = response
        sources[row, :counts[row]] = len(prompt) - 1 + np.arange(counts[row])
    return ScoredBatch(plain_rows(tokens, lengths), sources, targets, counts)
