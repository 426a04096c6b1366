"""What a chat endpoint is asked, and how hard: one checked group of settings."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

API_KEY_VARIABLE = "MEMCALIB_JUDGE_API_KEY"
THINKING_OFF = {
    "chat_template_kwargs": {"enable_thinking": False},
    "thinking": {"type": "disabled"},
    "reasoning_effort": "none",
}
"""Request fields that turn thinking off: of servers with a chat template (vLLM, SGLang), of
DeepSeek's service, and of OpenAI's."""


@dataclass(frozen=True)
class ChatSettings:
    """Names an OpenAI-compatible endpoint and bounds what is sent to it.

    `base_url` ends in `/v1`. `thinking_off` names the request field that turns thinking off: a key
    of `THINKING_OFF`, "none", or "auto" (by the host). `timeout` bounds one attempt as a whole, in
    seconds. `max_attempts` counts the first one. `cache_dir` None: no cache. `top_p` None leaves the
    nucleus to the endpoint. `key_variable` is the environment variable that holds the key.
    `tokens_per_minute` None: no limit; of prompts and replies. `hedge_after`: ask a second time
    after so many seconds without an answer, and take the first good one; None: never.

    Raises:
      ValueError: a value is out of range; the message names it and says what is allowed.
    """

    base_url: str
    model: str
    temperature: float = 0.0
    max_tokens: int = 16384
    thinking: bool = False
    thinking_off: str = "auto"
    timeout: float = 300.0
    max_attempts: int = 4
    max_concurrent: int = 64
    requests_per_minute: int = 240
    cache_dir: str | os.PathLike | None = None
    top_p: float | None = None
    key_variable: str = API_KEY_VARIABLE
    tokens_per_minute: int | None = None
    hedge_after: float | None = None

    def __post_init__(self):
        object.__setattr__(self, "base_url", _checked_base_url(self.base_url, self.key_variable))
        if not self.model:
            raise ValueError("model must not be empty: name a model that the endpoint serves")
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature must lie in [0, 2], not {self.temperature}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not 0.0 < self.timeout < float("inf"):
            raise ValueError(f"timeout must be a positive number of seconds, not {self.timeout}")
        if self.hedge_after is not None and not 0.0 < self.hedge_after < float("inf"):
            raise ValueError(f"hedge_after must be a positive number of seconds, not "
                             f"{self.hedge_after}")
        for name in ("max_tokens", "max_attempts", "max_concurrent", "requests_per_minute",
                     "tokens_per_minute"):
            value = getattr(self, name)
            if name == "tokens_per_minute" and value is None:
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        allowed = (*THINKING_OFF, "none", "auto")
        if self.thinking_off not in allowed:
            raise ValueError(
                f"thinking_off must be one of {', '.join(allowed)}, not {self.thinking_off!r}"
            )

    @property
    def is_loopback(self) -> bool:
        """Says whether the endpoint runs on this machine."""
        return _is_loopback(urlsplit(self.base_url).hostname)

    @property
    def thinking_field(self) -> str | None:
        """Names the request field to turn thinking off with, or None to send none."""
        if self.thinking or self.thinking_off == "none":
            return None
        if self.thinking_off != "auto":
            return self.thinking_off
        host = urlsplit(self.base_url).hostname
        if host.endswith("deepseek.com"):
            return "thinking"
        # All else is likely to be a server that renders a chat template. An endpoint or a model
        # that does not know its field gets it dropped at the first refusal.
        return "reasoning_effort" if host.endswith("openai.com") else "chat_template_kwargs"


def read_api_key(settings: ChatSettings, environ: Mapping[str, str] = os.environ) -> str | None:
    """Reads the endpoint's key from the environment; None where there is none and none is due.

    Raises:
      ValueError: a remote https endpoint without a key, or a key that no HTTP header can hold.
    """
    variable = settings.key_variable
    key = environ.get(variable, "").strip()
    if not key:
        if settings.base_url.startswith("https:") and not settings.is_loopback:
            raise ValueError(
                f"{settings.base_url} needs a key: set the environment variable {variable}"
            )
        return None
    # An HTTP library would name the offending header, key and all.
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(
            f"{variable} holds white space or characters that no HTTP header can carry"
        )
    return key


def _checked_base_url(url: str, key_variable: str) -> str:
    example = "such as https://api.deepseek.com/v1 or http://127.0.0.1:8000/v1"
    try:
        parts = urlsplit(url.strip())
        httpx.URL(url.strip())  # Refuses hosts that would fail at the first request.
        host, _ = parts.hostname, parts.port
    except (ValueError, AttributeError, httpx.InvalidURL):
        raise ValueError(f"base_url is not a URL; give one {example}") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "base_url must hold no user name, password, query or fragment; "
            f"put the key into the environment variable {key_variable}"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"base_url must start with http:// or https://, not {url!r}; {example}")
    path = parts.path.rstrip("/")
    if not path.endswith("/v1"):
        raise ValueError(f"base_url must end in /v1, not {url!r}; {example}")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
