"""MemCalib credit in float64 numpy by another route: loops, sorting, np.quantile."""

import bisect

import numpy as np

SIGNS = {
    "ordered": [0, 1, 1, -1, 1, 1, -1, -1, 1],
    "positive_only": [0, 1, 1, 0, 1, 1, 0, 1, 1],
    "guarded": [0, 1, 1, -1, 1, 1, -1, -1, 1],
}
UNDER_USE = (3, 6, 7)


def rewards(ideal, actual):
    """Rewards of one response from its lists of levels."""
    out = np.zeros(9)
    for wanted, used in zip(ideal, actual):
        value = 1.0 if wanted == used else -abs(wanted - used)
        out[3 * wanted + used] += value / list(ideal).count(wanted)
    return out


def z_scores(values, epsilon=1e-6, min_std=1e-6):
    """Z-scores of one group's valid values (a list)."""
    values = np.asarray(values, np.float64)
    if len(values) < 2 or values.std() < min_std:
        return np.zeros(len(values))
    return (values - values.mean()) / (values.std() + epsilon)


def group_advantages(values_P_G, valid_P_G):
    out = np.zeros(values_P_G.shape)
    for prompt in range(len(values_P_G)):
        members = np.flatnonzero(valid_P_G[prompt])
        out[prompt, members] = z_scores(values_P_G[prompt, members])
    return out


def project(multipliers, cap=4.0):
    """Bounded projection of one row, from the sorted kinks of the piecewise linear sum."""
    multipliers = np.asarray(multipliers, np.float64)
    count = len(multipliers)
    if cap == 1:
        return np.ones(count)

    def total(offset):
        return np.clip(multipliers - offset, 0, cap).sum()

    # The sum falls from cap * count to 0; the offset lies between two neighbouring kinks.
    kinks = np.unique(np.concatenate([multipliers, multipliers - cap]))
    right = bisect.bisect_left(kinks, True, key=lambda kink: total(kink) <= count)
    low, high = kinks[right - 1], kinks[right]
    share = (total(low) - count) / (total(low) - total(high))
    return np.clip(multipliers - low - share * (high - low), 0, cap)


def thresholds(now, scores, mask, quantile=0.75, floor=0.02, decay=0.9, min_count=256):
    """`scores` and `mask`: [..., C, T]."""
    out = np.array(now, np.float64)
    for channel in range(9):
        pool = scores[..., channel, :][mask[..., channel, :]].astype(np.float64)
        if len(pool) >= min_count:
            out[channel] = decay * out[channel] + (1 - decay) * max(
                floor, np.quantile(pool, quantile)
            )
    return out


def memcalib(case, *, mode="ordered", granularity="token", eta=0.75, weights=None, stops=False):
    """Token advantages [P, G, T] and what else is worth comparing, as a dict.

    `case` holds float64 or bool arrays: rewards, valid, full, ablated, scored, mask, thresholds,
    sentence_ids and sentence_thresholds for sentences, stop for `stops` and mode "guarded". `sure` is False for
    pairs whose gates stand within 1e-6 of an edge.
    """
    shape = case["rewards"].shape
    prompts, size, _ = shape
    length = case["mask"].shape[-1]
    eta = np.broadcast_to(eta, 9)
    weights = np.ones(9) if weights is None else weights
    advantages = np.stack(
        [group_advantages(case["rewards"][..., h], case["valid"]) for h in range(9)], axis=-1
    )
    totals = (advantages * weights).sum(-1)
    valid = case["valid"]
    rms = np.sqrt((totals[valid] ** 2).sum() / max(valid.sum(), 1) + 1e-6)
    multipliers = np.zeros((*shape, length))
    fallback = np.zeros(shape, int)
    sure = np.ones(shape, bool)
    out = np.zeros((prompts, size, length))
    for p, g in np.ndindex(prompts, size):
        tokens = np.flatnonzero(case["mask"][p, g])
        multipliers[p, g][:, tokens] = 1.0
        for h in range(9):
            fallback[p, g, h], m, sure[p, g, h] = _pair(
                case, p, g, h, tokens, advantages[p, g, h], mode, granularity, stops
            )
            if m is not None:
                multipliers[p, g, h, tokens] = m
        if valid[p, g]:
            mixed = (1 - eta)[:, None] + eta[:, None] * multipliers[p, g][:, tokens]
            out[p, g, tokens] = (weights * advantages[p, g]) @ mixed / rms
    return dict(
        token_advantages=out,
        advantages=advantages,
        rms=rms,
        multipliers=multipliers,
        fallback=fallback,
        sure=sure,
    )


def _pair(case, p, g, h, tokens, advantage, mode, granularity, stops):
    """Return the fallback code, the multipliers of the tokens or None, and whether it is sure."""
    reward = case["rewards"][p, g, h] if case["valid"][p, g] else 0.0
    if reward == 0:
        return 1, None, True
    if h == 0 or (mode == "positive_only" and h in (3, 6)):
        return 2, None, True
    if not case["scored"][p, g, h]:
        return 3, None, True
    d = case["full"][p, g, tokens] - case["ablated"][p, g, h, tokens]
    z = abs(d) if mode == "absolute" else SIGNS[mode][h] * d
    clipped = np.clip(z, -3, 3)
    threshold = case["thresholds"][h]
    candidates = np.ones(len(tokens), bool)
    edges = []
    if h in UNDER_USE and (stops or mode == "guarded"):
        candidates = ~case["stop"][p, g, tokens]
    if h in UNDER_USE and mode == "guarded":
        for right in (4, 8):
            supported, near = _supported(case, p, g, right, tokens, granularity)
            candidates &= ~supported
            edges.append(near)
    strongest = z[candidates].max(initial=-np.inf)
    edges += [strongest - 0.02, reward * advantage]
    strong = strongest > 0.02
    scores = np.zeros(len(tokens))
    if granularity == "token":
        scores[candidates] = np.maximum(clipped[candidates] - threshold, 0)
        edges.append(clipped[candidates].max(initial=-np.inf) - threshold)
    else:
        best = -np.inf
        edges.append(min(abs(z - threshold), default=1.0))
        for sentence in set(case["sentence_ids"][p, g, tokens]):
            inside = (case["sentence_ids"][p, g, tokens] == sentence) & candidates
            if not inside.any():
                continue
            mean = clipped[inside].mean()
            best = max(best, mean)
            above = mean - case["sentence_thresholds"][h]
            coverage = (z[inside] > threshold).mean()
            scores[inside] = max(above, 0) * coverage / inside.sum()
            edges.append(above)
        edges.append(best - 0.01)
        strong = strong and best > 0.01
    sure = min(abs(edge) for edge in edges) > 1e-6
    if not strong:
        return 4, None, sure
    if scores.sum() <= 0:
        return 5, None, sure
    if reward * advantage <= 0:
        return 6, None, sure
    return 0, project(len(tokens) * scores / scores.sum()), sure


def _supported(case, p, g, h, tokens, granularity):
    """Return which tokens the right channel `h` supports, and how near an edge that is decided."""
    supported = np.zeros(len(tokens), bool)
    if not case["scored"][p, g, h] or not len(tokens):
        return supported, 1.0
    d = np.clip(case["full"][p, g, tokens] - case["ablated"][p, g, h, tokens], -3, 3)
    above = d - case["thresholds"][h]
    if granularity == "token":
        return above > 0, min(abs(above))
    near = min(abs(above))
    ids = case["sentence_ids"][p, g, tokens]
    for sentence in set(ids):
        inside = ids == sentence
        over = d[inside].mean() - case["sentence_thresholds"][h]
        near = min(near, abs(over))
        # The sentence's score also has its coverage as a factor.
        supported[inside] = over > 0 and (above[inside] > 0).any()
    return supported, near


def random_case(seed, *, prompts=3, size=8, length=40, poison=np.nan):
    """Draw a batch with invalid rows, ragged lengths and missing counterfactuals.

    Everything behind a mask is `poison`. Float32 throughout, so that the float64 copy is exact.
    """
    rng = np.random.default_rng(seed)
    ideal = rng.choice(3, (prompts, 1, 7), p=[0.5, 0.25, 0.25])
    slips = rng.random((prompts, size, 7)) < 0.4
    actual = np.where(slips, rng.integers(0, 3, (prompts, size, 7)), ideal)
    case = {
        "rewards": np.array(
            [
                [rewards(ideal[p, 0], actual[p, g]) for g in range(size)]
                for p in range(prompts)
            ]
        ),
        "valid": rng.random((prompts, size)) < 0.85,
    }
    lengths = rng.integers(1, length + 1, (prompts, size))
    case["mask"] = np.arange(length) < lengths[..., None]
    case["full"] = -rng.exponential(1.0, (prompts, size, length))
    spikes = rng.random((prompts, size, 9, length)) < 0.15
    noise = rng.normal(0, 0.05, spikes.shape) + spikes * rng.normal(0, 2.0, spikes.shape)
    case["ablated"] = case["full"][..., None, :] - noise
    case["scored"] = rng.random((prompts, size, 9)) < 0.9
    case["thresholds"] = rng.uniform(0.02, 0.4, 9)
    case["sentence_thresholds"] = rng.uniform(0.01, 0.1, 9)
    breaks = rng.random((prompts, size, length)) < 0.15
    case["sentence_ids"] = np.cumsum(breaks, -1) - breaks[..., :1]
    case["stop"] = np.arange(length) == lengths[..., None] - 1
    hidden = ~case["mask"] | ~case["valid"][..., None]
    case["rewards"][~case["valid"]] = poison
    case["full"][hidden] = poison
    case["ablated"][np.broadcast_to(hidden[..., None, :], case["ablated"].shape)] = poison
    case["ablated"][~case["scored"]] = poison
    return {
        name: array.astype(np.float32) if array.dtype == np.float64 else array
        for name, array in case.items()
    }


def doubled(case):
    """The same case in float64."""
    return {
        name: array.astype(np.float64) if array.dtype == np.float32 else array
        for name, array in case.items()
    }
