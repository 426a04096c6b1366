"""Every number of a trace's advantages again, in float64, from the trace alone."""

import numpy as np


def project(values, cap):
    """The nearest multipliers with mean 1 in [0, cap], from the breakpoints of the sum."""
    points = np.sort(np.concatenate([values, values - cap]))
    sums = np.array([np.clip(values - point, 0, cap).sum() for point in points])
    place = np.searchsorted(-sums, -len(values)) - 1  # sums fall as the offset grows
    place = min(max(place, 0), len(points) - 2)
    left, right, high, low = points[place], points[place + 1], sums[place], sums[place + 1]
    offset = left if high == low else left + (high - len(values)) * (right - left) / (high - low)
    return np.clip(values - offset, 0, cap)


def z_scores(rewards, valid, groups, epsilon, min_std):
    """Rewards [R, C] normalized within each group's valid responses."""
    result = np.zeros(rewards.shape)
    for group in np.unique(groups):
        members = np.flatnonzero((groups == group) & valid)
        if len(members) > 1:
            values = rewards[members].astype(np.float64)
            std = values.std(axis=0)
            result[members] = np.where(
                std >= min_std, (values - values.mean(axis=0)) / (std + epsilon), 0.0)
    return result


def supported(trace, response, tokens):
    """Returns which of a response's tokens right use supports [T]."""
    s = trace.settings
    found = np.zeros(trace.length_R[response], bool)
    lengths = trace.length_R[trace.pair_response_S]
    for channel in (4, 8):
        which = (trace.pair_response_S == response) & (trace.pair_channel_S == channel)
        for pair in np.flatnonzero(which):
            first = lengths[:pair].sum()
            d = trace.difference[first:first + lengths[pair]].astype(np.float64)
            d = np.clip(d, -s["max_difference"], s["max_difference"])
            above = d > trace.thresholds_C[channel]
            if s["granularity"] == "sentence":
                numbers = trace.sentence_N[tokens]
                size = np.bincount(numbers)
                mean = np.bincount(numbers, d) / np.maximum(size, 1)
                covered = np.bincount(numbers, above) > 0
                above = ((mean > trace.sentence_thresholds_C[channel]) & covered)[numbers]
            found |= above
    return found


def advantages(trace):
    """Returns the token advantages [N], the multipliers by pair, and the scores by pair."""
    s = trace.settings
    eta, weights = np.array(s["eta_C"]), np.array(s["channel_weights_C"])
    channel_advantages = z_scores(
        trace.rewards_R_C, trace.valid_R, trace.record_R, s["epsilon"], s["min_std"])
    totals = (channel_advantages * weights).sum(axis=1)
    rms = np.sqrt(np.mean(totals[trace.valid_R] ** 2) + s["epsilon"])
    result = np.repeat(totals, trace.length_R)
    multipliers, scores = {}, {}
    start = 0
    for pair, (r, c) in enumerate(zip(trace.pair_response_S, trace.pair_channel_S)):
        d = trace.difference[start:start + trace.length_R[r]].astype(np.float64)
        start += trace.length_R[r]
        first = trace.length_R[:r].sum()
        tokens = slice(first, first + trace.length_R[r])
        ideal, actual = divmod(int(c), 3)
        sign = -1.0 if actual < ideal and s["mode"] in ("ordered", "guarded") else 1.0
        z = abs(d) if s["mode"] == "absolute" else sign * d
        candidates = np.ones(len(d), bool)
        if trace.stop_N is not None and actual < ideal:
            candidates = ~trace.stop_N[tokens]
        if s["mode"] == "guarded" and actual < ideal:
            candidates = candidates & ~supported(trace, r, tokens)
        clipped = np.clip(z, -s["max_difference"], s["max_difference"])
        gate = candidates.any() and z[candidates].max() > s["min_signal"]
        threshold = float(trace.thresholds_C[c])
        q = np.maximum(clipped - threshold, 0) * candidates
        if s["granularity"] == "sentence":
            numbers, q, means = trace.sentence_N[tokens], np.zeros(len(d)), []
            for j in range(numbers.max() + 1):
                inside = candidates & (numbers == j)
                if inside.any():
                    means.append(clipped[inside].mean())
                    share = (z[inside] > threshold).mean() ** s["coverage_power"]
                    q[inside] = max(means[-1] - float(trace.sentence_thresholds_C[c]), 0) * share
                    q[inside] /= inside.sum()
            gate = gate and max(means) > s["min_sentence_signal"]
        scores[pair] = q
        if gate and q.sum() > 0 and trace.rewards_R_C[r, c] * channel_advantages[r, c] > 0:
            m = project(len(d) * q / q.sum(), s["cap"])
            multipliers[pair] = m
            result[tokens] += weights[c] * channel_advantages[r, c] * eta[c] * (m - 1)
    result = np.where(np.repeat(trace.valid_R, trace.length_R), result / rms, 0.0)
    return result, multipliers, scores
