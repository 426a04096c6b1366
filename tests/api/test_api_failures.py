import random
from datetime import UTC, datetime

import pytest

from memcalib_jax.api.failures import backoff_seconds, parse_retry_after

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    "value, seconds",
    [
        (None, None),
        ("0", 0.0),
        (" 17 ", 17.0),
        ("1.5", 1.5),
        ("Sun, 01 Mar 2026 12:01:30 GMT", 90.0),
        ("Sun, 01 Mar 2026 12:01:30", 90.0),
        ("Sun, 01 Mar 2026 13:00:00 +0200", 0.0),
        ("Sun, 01 Mar 2026 11:00:00 GMT", 0.0),
        ("soon", None),
        ("-5", None),
        ("٣", None),
        ("9" * 5000, None),
        ("", None),
    ],
)
def test_retry_after(value, seconds):
    assert parse_retry_after(value, NOW) == seconds


@pytest.mark.parametrize(
    "retry, least", [(0, 1.5), (1, 3.0), (2, 6.0), (3, 12.0), (4, 24.0), (5, 30.0), (5000, 30.0)]
)
def test_backoff(retry, least):
    rng = random.Random(3)
    waits = [backoff_seconds(retry, rng) for _ in range(200)]
    assert least <= min(waits) < least + 0.05
    assert least + 0.45 < max(waits) <= least + 0.5
