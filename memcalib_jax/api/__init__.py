"""Calls to OpenAI-compatible endpoints: limits, retries, cache and accounting."""

from memcalib_jax.api.background import BackgroundLoop
from memcalib_jax.api.client import ChatClient, Reply
from memcalib_jax.api.failures import FAILURE_KINDS, ChatError, Stopped
from memcalib_jax.api.settings import API_KEY_VARIABLE, ChatSettings, read_api_key

__all__ = [
    "API_KEY_VARIABLE",
    "BackgroundLoop",
    "ChatClient",
    "ChatError",
    "ChatSettings",
    "FAILURE_KINDS",
    "Reply",
    "Stopped",
    "read_api_key",
]
