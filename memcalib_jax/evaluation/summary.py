"""An evaluation's figures: of each seed, over seeds, by domain and by channel."""

from collections.abc import Sequence

import numpy as np

from memcalib_jax.credit import CHANNELS
from memcalib_jax.evaluation.agreement import confusion
from memcalib_jax.evaluation.metrics import (
    calibration_metrics,
    channel_proportions,
    macro_accuracy,
    mean_and_std,
)

METRICS = ("SCS", "Exact", "sMOS", "sMUS", "AOR", "AUR")
HIGHER_IS_BETTER = ("SCS", "Exact")


def summarize(
    ideal_N_S_A: np.ndarray,
    actual_N_S_A: np.ndarray,
    atom_mask_N_S_A: np.ndarray,
    valid_N_S: np.ndarray,
    domains_N: Sequence[str],
) -> dict:
    """Sums up judged responses to N records under S seeds (section 4.4 and F, arXiv 2609.24259).

    Args:
      ideal_N_S_A, actual_N_S_A: int, levels 0..2.
      atom_mask_N_S_A: bool; levels outside it may be anything.
      valid_N_S: bool, responses with a judgment; others are left out.
      domains_N: the records' domains.

    Returns:
      What JSON can hold, in percent: `overall` and `by_domain`, figures as `_figures` gives them;
      `channels`, pooled over seeds: an object a channel with `atoms` (their number), `of_all` and
      `of_ideal` (their share of all atoms, and of those of their ideal level: None if there are
      none); `macro_accuracy`, pooled over seeds.

    Raises:
      ValueError: a seed has no valid response.
    """
    arrays = [np.asarray(array) for array in (ideal_N_S_A, actual_N_S_A, atom_mask_N_S_A)]
    valid, domains = np.asarray(valid_N_S, bool), np.asarray(domains_N)
    for seed in np.flatnonzero(~valid.any(axis=0)):
        raise ValueError(f"seed {seed} has no valid response")
    # Seeds are pooled by laying their responses one after the other.
    ideal, actual, mask = (array.reshape(-1, array.shape[-1]) for array in arrays)
    pooled = {"valid_N": valid.reshape(-1)}
    chosen = mask & valid.reshape(-1, 1)
    counts = confusion(ideal[chosen], actual[chosen], 3)
    of_all = channel_proportions(ideal, actual, mask, **pooled)
    channels = {}
    for name, (level, judged) in zip(CHANNELS, np.ndindex(3, 3)):
        atoms, of_level = int(counts[level, judged]), int(counts[level].sum())
        channels[name] = {"atoms": atoms, "of_all": of_all[name],
                          "of_ideal": 100.0 * atoms / of_level if of_level else None}
    return {
        "overall": _figures(*arrays, valid),
        "by_domain": {
            str(domain): _figures(*(array[domains == domain] for array in (*arrays, valid)))
            for domain in np.unique(domains)},
        "channels": channels,
        "macro_accuracy": macro_accuracy(ideal, actual, mask, **pooled),
    }


def _figures(ideal_N_S_A, actual_N_S_A, atom_mask_N_S_A, valid_N_S):
    """Gives the six metrics of some records.

    `records` and `valid` (responses of all seeds) are numbers; `seeds` lists the metrics of each
    seed, None where it has no valid response; `mean` and `std` (ddof 1) are over the others, None
    where there are too few.
    """
    seeds = [
        calibration_metrics(ideal_N_S_A[:, seed], actual_N_S_A[:, seed], atom_mask_N_S_A[:, seed],
                            valid_N=valid_N_S[:, seed]) if valid_N_S[:, seed].any() else None
        for seed in range(valid_N_S.shape[1])]
    judged = [metrics for metrics in seeds if metrics is not None]
    over_seeds = {
        name: mean_and_std([metrics[name] for metrics in judged]) if judged else (None, None)
        for name in METRICS}
    return {
        "records": len(valid_N_S), "valid": int(valid_N_S.sum()), "seeds": seeds,
        "mean": {name: mean for name, (mean, _) in over_seeds.items()},
        "std": {name: std for name, (_, std) in over_seeds.items()},
    }
