"""Rotary frequencies, and what stretches them to longer contexts.

Frequencies are radians a position, computed in float64 and meant to be rounded once. A scaling's
fields bear the names that a Hugging Face `rope_parameters` gives them.
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Linear:
    """Every position divided by `factor`."""

    factor: float
    magnitude = 1.0

    def stretch(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Returns the stretched `frequencies [n]`."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Slow frequencies divided by `factor`, fast ones kept, a ramp between (Llama 3.1).

    Slow ones turn fewer than `low_freq_factor` times within the original context, fast ones more
    than `high_freq_factor` times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    magnitude = 1.0

    def stretch(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Returns the stretched `frequencies [n]`."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor)
                       / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): a ramp over dimensions, and larger queries and keys.

    Dimensions that turn at least `beta_fast` times within the original context keep their
    frequency, those that turn at most `beta_slow` times have it divided by `factor`. `truncate`
    rounds the ramp's ends outwards to whole dimensions. `attention_factor` multiplies rotated
    queries and keys; None derives it from `factor`, or from both `mscale`s where they are given.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied with."""
        def growth(scale):
            return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return growth(self.mscale) / growth(self.mscale_all_dim)
        return growth(1.0)

    def stretch(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Returns the stretched `frequencies [n]`."""
        pairs = len(frequencies)

        def dimension(turns):  # which dimension turns so often within the original context
            context = self.original_max_position_embeddings
            return pairs * math.log(context / (turns * 2 * math.pi)) / math.log(theta)

        first, last = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        width = last - first or 0.001
        divided = np.clip((np.arange(pairs) - first) / width, 0, 1)
        return frequencies * (1 - divided + divided / self.factor)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Attributes:
      theta: base of the frequencies.
      partial_rotary_factor: share of a head that is rotated, its leading dimensions.
      scaling: what stretches the frequencies, if anything.
    """

    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    scaling: Linear | Llama3 | Yarn | None = None

    def rotated_dims(self, head_dim: int) -> int:
        """Returns how many of a head's dimensions are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Returns float64 `[rotated_dims / 2]`."""
        pairs = self.rotated_dims(head_dim) // 2
        frequencies = self.theta ** (-np.arange(pairs) / pairs)
        return self.scaling.stretch(frequencies, self.theta) if self.scaling else frequencies

    @property
    def magnitude(self) -> float:
        """What rotated dimensions are multiplied with."""
        return self.scaling.magnitude if self.scaling else 1.0


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """Queries sharpened by their position: times `1 + beta log(1 + floor(position / period))`.

    Attributes:
      beta: strength (`llama_4_scaling_beta`).
      period: positions of one step, the original context (`original_max_position_embeddings`).
    """

    beta: float
    period: int
