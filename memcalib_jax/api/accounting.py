"""What the calls to an endpoint cost and how they went."""

from collections import Counter, deque

import numpy as np

from memcalib_jax.api.failures import FAILURE_KINDS

_LATENCIES_KEPT = 4096


class Accounting:
    """Counts from the start of a client; latencies are of the last answered attempts."""

    def __init__(self):
        self.counts = Counter()
        self.waited_seconds = 0.0
        self.failures = Counter()
        self.failed_attempts = Counter()
        self.latencies: deque[float] = deque(maxlen=_LATENCIES_KEPT)

    def waited(self, seconds: float) -> None:
        """Notes a wait for the rate limit or before a retry."""
        if seconds >= 1e-3:  # Less is the clock's own running, no wait.
            self.counts["waits"] += 1
            self.waited_seconds += seconds

    def snapshot(self) -> dict:
        """Copies the figures into a plain dict; latencies in seconds, 0 where there are none."""
        names = ("requests attempts retries hedges cache_hits waits prompt_tokens "
                 "completion_tokens").split()
        latencies = list(self.latencies) or [0.0]
        return {
            **{name: self.counts[name] for name in names},
            "waited_seconds": self.waited_seconds,
            "latency_mean": float(np.mean(latencies)),
            "latency_p95": float(np.quantile(latencies, 0.95)),
            "failures": {kind: self.failures[kind] for kind in FAILURE_KINDS},
            "failed_attempts": {kind: self.failed_attempts[kind] for kind in FAILURE_KINDS},
        }
