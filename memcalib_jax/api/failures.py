"""Why a call failed, whether to ask again, and how long to wait before."""

import random
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

FAILURE_KINDS = ("timeout", "network", "rate_limit", "http_4xx", "http_5xx", "parse", "empty",
                 "budget")

_RETRIED_4XX = (408, 409, 429)


class ChatError(Exception):
    """Says that a call failed: `kind` is one of `FAILURE_KINDS`; the message holds no key."""

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        retried: bool = True,
        retry_after: float | None = None,
        status: int | None = None,
    ):
        super().__init__(message)
        self.kind = kind
        self.retried = retried
        self.retry_after = retry_after
        self.status = status


class Stopped(Exception):
    """A call was not made, because its client starts none any more."""


def http_failure(status: int, body: str, retry_after: str | None, now: datetime) -> ChatError:
    """Classes an answer other than 2xx; redirects count among the caller's errors (http_4xx)."""
    seconds = parse_retry_after(retry_after, now)
    message = f"HTTP {status}: {body or 'no text'}"
    if seconds is not None:
        message += f" (asks to come back in {seconds:g} s)"
    if status == 429:
        kind = "rate_limit"
    elif status == 408:
        kind = "timeout"
    else:
        kind = "http_5xx" if status >= 500 else "http_4xx"
    return ChatError(
        kind,
        message,
        retried=status >= 500 or status in _RETRIED_4XX,
        retry_after=seconds,
        status=status,
    )


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """Reads a Retry-After header, seconds or an HTTP date, as seconds from now; None if unread."""
    if value is None:
        return None
    value = value.strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - now).total_seconds())


def backoff_seconds(retry: int, rng: random.Random) -> float:
    """Gives the wait before the retry-th retry (from 0): min(30, 1.5 * 2**retry) + U(0, 0.5)."""
    return min(30.0, 1.5 * 2.0 ** min(retry, 10)) + rng.uniform(0.0, 0.5)
