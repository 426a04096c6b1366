"""How well two readers of the same items agree."""

from statistics import NormalDist

import numpy as np


def confusion(reference_N, predicted_N, num_classes: int) -> np.ndarray:
    """Counts the pairs of labels.

    Args:
      reference_N, predicted_N: whole labels in [0, num_classes), equally many.
      num_classes: the number of labels.

    Returns:
      int64 [num_classes, num_classes]: rows are the reference's labels, columns the predicted.

    Raises:
      ValueError: shapes differ, there are no items, or a label is out of range.
    """
    reference_N, predicted_N = np.asarray(reference_N), np.asarray(predicted_N)
    if reference_N.shape != predicted_N.shape or reference_N.ndim != 1 or not reference_N.size:
        raise ValueError(
            "labels must be two equally long lists of at least one item, not of shapes "
            f"{reference_N.shape} and {predicted_N.shape}"
        )
    for labels in (reference_N, predicted_N):
        if not np.issubdtype(labels.dtype, np.integer) or not np.all(
            (labels >= 0) & (labels < num_classes)
        ):
            raise ValueError(f"labels must be whole numbers from 0 to {num_classes - 1}")
    counts = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(counts, (reference_N, predicted_N), 1)
    return counts


def accuracy(counts) -> float:
    """Gives the share of items, in [0, 1], on which both readers agree, from their confusion."""
    counts = np.asarray(counts)
    return float(np.trace(counts) / counts.sum())


def cohen_kappa(counts) -> float:
    """Gives Cohen's kappa, agreement beyond chance, from the readers' confusion.

    (observed - expected) / (1 - expected), expected being the agreement of independent readers
    with the same label frequencies. 1 where both use one and the same label throughout, since
    then they agree on everything and chance explains it all (0 / 0).
    """
    counts = np.asarray(counts, np.float64)
    total = counts.sum()
    expected = float(counts.sum(0) @ counts.sum(1) / total**2)
    if expected == 1.0:
        return 1.0
    return (accuracy(counts) - expected) / (1.0 - expected)


def wilson_interval(agreed: int, total: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Gives Wilson's score interval of a share, in [0, 1], from its count.

    Raises:
      ValueError: the count is not within the total, or the confidence not within (0, 1).
    """
    if not 0 <= agreed <= total or total < 1 or not 0 < confidence < 1:
        raise ValueError(f"no interval of {agreed} in {total} at confidence {confidence}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, shrink = agreed / total, 1 + z**2 / total
    center = (share + z**2 / (2 * total)) / shrink
    half = z / shrink * np.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return float(max(center - half, 0.0)), float(min(center + half, 1.0))


def reader_agreement(reference_N, predicted_N, num_classes: int) -> dict:
    """Sums up how far a reader agrees with the reference (C, arXiv 2609.24259).

    Arguments and errors are those of `confusion`.

    Returns:
      What JSON can hold: `total`, `agreed`, `lower` and `higher` (predicted under and over the
      reference) are counts; `agreement` and its 95% Wilson `interval` are in percent; `kappa` is
      Cohen's; `confusion` has the reference's labels as rows, `row_percent` is in percent of a
      row's sum, None in an empty row.
    """
    counts = confusion(reference_N, predicted_N, num_classes)
    total, agreed = int(counts.sum()), int(np.trace(counts))
    return {
        "total": total, "agreed": agreed,
        "lower": int(np.tril(counts, -1).sum()), "higher": int(np.triu(counts, 1).sum()),
        "agreement": 100.0 * agreed / total,
        "interval": [100.0 * bound for bound in wilson_interval(agreed, total)],
        "kappa": cohen_kappa(counts),
        "confusion": counts.tolist(),
        "row_percent": [[100.0 * cell / sum(row) if sum(row) else None for cell in row]
                        for row in counts.tolist()],
    }


def pearson(first_N, second_N) -> float | None:
    """Gives Pearson's correlation of two lists of numbers; None where one is constant.

    Raises:
      ValueError: the lists differ in length, or hold fewer than two numbers.
    """
    first, second = (np.asarray(values, np.float64) for values in (first_N, second_N))
    if first.shape != second.shape or first.ndim != 1 or first.size < 2:
        raise ValueError("a correlation needs two equally long lists of at least two numbers, not "
                         f"of shapes {first.shape} and {second.shape}")
    if np.all(first == first[0]) or np.all(second == second[0]):
        return None
    first, second = first - first.mean(), second - second.mean()
    scale = np.sqrt(first @ first) * np.sqrt(second @ second)
    return float(np.clip(first @ second / scale, -1.0, 1.0))


def spearman(first_N, second_N) -> float | None:
    """Gives Spearman's correlation: Pearson's of the ranks, equal values sharing their mean rank.

    Arguments and errors are those of `pearson`.
    """
    return pearson(*(_ranks(values) for values in (first_N, second_N)))


def _ranks(values_N):
    values = np.asarray(values_N)
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    return (last - (sizes - 1) / 2)[group].reshape(values.shape)
