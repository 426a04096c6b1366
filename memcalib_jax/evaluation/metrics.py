"""Memory-use metrics of judged responses (section 2.3 and 4.4, arXiv 2609.24259)."""

from collections.abc import Sequence

import numpy as np

from memcalib_jax.credit import CHANNELS

_LEVELS = ("Ignore", "Bound", "Control")


def calibration_metrics(
    ideal_N_A: np.ndarray,
    actual_N_A: np.ndarray,
    atom_mask_N_A: np.ndarray,
    *,
    valid_N: np.ndarray | None = None,
    rho: float = 0.5,
) -> dict[str, float]:
    """Score responses by how far they over-use and under-use their atoms (section 2.3).

    With O and U a response's summed steps above and below the ideal levels: sMOS and sMUS are the
    means of `1 - rho^O` and `1 - rho^U`, AOR and AUR the shares with O > 0 and U > 0, SCS the mean
    of `rho^(O + U)`, Exact the share with O + U = 0.

    Args:
      ideal_N_A: int [N, A], the ideal level of each atom, 0..2.
      actual_N_A: int [N, A], the judged level, 0..2.
      atom_mask_N_A: bool [N, A]; levels outside it may be anything.
      valid_N: bool [N], responses with a judgment; others are left out. None: all are.
      rho: decay of a response's score with each step, in (0, 1).

    Returns:
      Python floats in [0, 100] under sMOS, sMUS, AOR, AUR, SCS and Exact.

    Raises:
      ValueError: no valid response, a valid response without atoms, a level outside 0..2, shapes
        that differ, or rho outside (0, 1).
    """
    if not 0 < rho < 1:
        raise ValueError(f"rho must lie between 0 and 1, got {rho}")
    ideal, actual, mask = checked_levels(ideal_N_A, actual_N_A, atom_mask_N_A, valid_N)
    steps = np.where(mask, actual - ideal, 0)
    over = np.maximum(steps, 0).sum(axis=1)
    under = np.maximum(-steps, 0).sum(axis=1)
    means = {
        "sMOS": np.mean(1.0 - rho**over),
        "sMUS": np.mean(1.0 - rho**under),
        "AOR": np.mean(over > 0),
        "AUR": np.mean(under > 0),
        "SCS": np.mean(rho ** (over + under)),
        "Exact": np.mean(over + under == 0),
    }
    return {name: 100.0 * float(mean) for name, mean in means.items()}


def channel_proportions(
    ideal_N_A: np.ndarray,
    actual_N_A: np.ndarray,
    atom_mask_N_A: np.ndarray,
    *,
    valid_N: np.ndarray | None = None,
) -> dict[str, float]:
    """Return the share of all judged atoms in each of the nine channels, in percent.

    Arguments and errors are those of `calibration_metrics`; the nine shares sum to 100.
    """
    ideal, actual, mask = checked_levels(ideal_N_A, actual_N_A, atom_mask_N_A, valid_N)
    counts = np.bincount((3 * ideal + actual)[mask], minlength=len(CHANNELS))
    return {name: 100.0 * int(n) / int(mask.sum()) for name, n in zip(CHANNELS, counts)}


def macro_accuracy(
    ideal_N_A: np.ndarray,
    actual_N_A: np.ndarray,
    atom_mask_N_A: np.ndarray,
    *,
    valid_N: np.ndarray | None = None,
) -> float:
    """Return the mean over ideal levels of the share of atoms judged at that level, in percent.

    Each level that occurs counts once, however rare. Arguments and errors are those of
    `calibration_metrics`.
    """
    ideal, actual, mask = checked_levels(ideal_N_A, actual_N_A, atom_mask_N_A, valid_N)
    right = (actual == ideal)[mask]
    shares = [right[ideal[mask] == level].mean() for level in np.unique(ideal[mask])]
    return 100.0 * float(np.mean(shares))


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean over seeds and the sample standard deviation (ddof 1).

    The deviation of a single value is unknown: None, which also is what JSON can hold.

    Raises:
      ValueError: no values.
    """
    values = np.asarray(values, np.float64)
    if values.size == 0:
        raise ValueError("mean_and_std needs at least one value")
    deviation = float(values.std(ddof=1)) if values.size > 1 else None
    return float(values.mean()), deviation


def checked_levels(ideal_N_A, actual_N_A, atom_mask_N_A, valid_N):
    """Check judgments; return the valid rows' ideal and actual levels and their mask.

    Arguments and errors are those of `calibration_metrics`. Levels are int64, 0 outside the mask.
    """
    mask = np.asarray(atom_mask_N_A, bool)
    if mask.ndim != 2:
        raise ValueError(f"atom_mask_N_A must be [responses, atoms], got shape {mask.shape}")
    valid = np.ones(len(mask), bool) if valid_N is None else np.asarray(valid_N, bool)
    if valid.shape != mask.shape[:1]:
        raise ValueError(f"valid_N must have shape {mask.shape[:1]}, got {valid.shape}")
    if not valid.any():
        raise ValueError(f"none of the {len(valid)} responses is valid: there is nothing to score")
    rows = np.flatnonzero(valid)
    mask = mask[rows]
    if not mask.any(axis=1).all():
        row = int(rows[~mask.any(axis=1)][0])
        raise ValueError(f"response {row} is valid but has no atoms: mark it invalid or drop it")
    levels = []
    for name, array in (("ideal_N_A", ideal_N_A), ("actual_N_A", actual_N_A)):
        array = np.asarray(array)
        if array.shape != np.shape(atom_mask_N_A):
            raise ValueError(
                f"{name} must have shape {np.shape(atom_mask_N_A)}, got {array.shape}"
            )
        known = np.isin(array[rows], range(len(_LEVELS)))
        if not known[mask].all():
            row, atom = np.argwhere(mask & ~known)[0]
            raise ValueError(
                f"{name}: atom {atom} of response {rows[row]} has level "
                f"{array[rows[row], atom]}; levels are 0, 1, 2 ({', '.join(_LEVELS)})"
            )
        levels.append(np.where(mask, array[rows], 0).astype(np.int64))
    return *levels, mask
