"""How well two readers of the same items agree."""

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
