"""Serves a model of ours through the JAX sampler, as an OpenAI-compatible endpoint."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from memcalib_jax import models
from memcalib_jax.api.server import ChatServer, Refusal
from memcalib_jax.data import render
from memcalib_jax.judge.batching import Batches, Full
from memcalib_jax.sampling import sample

_OWNER = "memcalib_jax"


@dataclass(frozen=True)
class Asked:
    """A request as the sampler takes it; requests of one `kind` can be sampled together."""

    prompt: list[int]
    request_id: int
    temperature: float
    top_p: float
    max_tokens: int

    @property
    def kind(self) -> tuple:
        """What one call of the sampler has in common."""
        return self.temperature, self.top_p, self.max_tokens


class ModelServer:
    """Answers chat completions with a model, requests that wait being sampled together.

    A request draws the same random numbers whatever shares its batch: they follow from its
    messages and `seed`.

    Args:
      params, config, tokenizer: the model.
      max_response_tokens: longest reply; a request that asks for more gets as many.
      largest_batch: most requests that are sampled together.
      most_waiting: most requests that wait for a batch; more are refused with HTTP 503.
    """

    def __init__(self, params: dict, config: models.ModelConfig, tokenizer, *,
                 max_response_tokens: int = 2048, largest_batch: int = 64,
                 most_waiting: int = 256):
        self._params, self._config, self._tokenizer = params, config, tokenizer
        self._max_response_tokens = max_response_tokens
        self._batches = Batches(self._sample, largest=largest_batch, most_waiting=most_waiting)

    def server(self, port: int, name: str) -> ChatServer:
        """Makes a server of the model under a name."""
        return ChatServer(port, {name: _OWNER}, self.answer)

    def close(self) -> None:
        """Ends the sampling of what waits."""
        self._batches.close()

    def answer(self, body: dict) -> dict:
        """Answers one request; waits for its batch.

        Raises:
          ValueError: the request will not do; the message names the field.
          Refusal: too many wait (503), or the model failed (500).
        """
        asked = self.read(body)
        try:
            result = self._batches.submit(asked.kind, asked).result()
        except Full:
            raise Refusal(503, "too many requests wait for this model: come back, or ask for "
                               "fewer at once", retry_after=1.0) from None
        except Exception as error:
            raise Refusal(500, f"the model failed: {error}") from None
        tokens = result.tokens[:-1] if result.finish_reason == "stop" else result.tokens
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return {"message": {"role": "assistant", "content": text},
                "finish_reason": result.finish_reason,
                "usage": {"prompt_tokens": len(asked.prompt),
                          "completion_tokens": len(result.tokens),
                          "total_tokens": len(asked.prompt) + len(result.tokens)}}

    def read(self, body: dict) -> Asked:
        """Reads a request's body.

        Raises:
          ValueError: a field is out of range or not served, or the prompt leaves no room.
        """
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(
                isinstance(item, dict) and isinstance(item.get("role"), str)
                and isinstance(item.get("content"), str) for item in messages):
            raise ValueError("messages must be a list of objects with role and content, both text")
        for field, only in (("n", (None, 1)), ("response_format", (None, {"type": "text"})),
                            ("tools", (None, [])), ("logprobs", (None, False))):
            if body.get(field) not in only:
                raise ValueError(f"{field} is not supported")
        temperature = _number(body, "temperature", 1.0, 0.0, 2.0)
        top_p = _number(body, "top_p", 1.0, 1e-6, 1.0)
        prompt = render(self._tokenizer, messages)
        room = self._config.max_positions - len(prompt)
        if room < 1:
            raise ValueError(f"the prompt has {len(prompt)} tokens, and the model "
                             f"{self._config.max_positions} positions for prompt and reply")
        # A client that knows the newer name alone sends that.
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError("max_tokens must be a whole number of at least 1")
        longest = min(limit or self._max_response_tokens, self._max_response_tokens, room)
        seed = body.get("seed") or 0
        identity = json.dumps([messages, seed], sort_keys=True).encode()
        request_id = int.from_bytes(hashlib.sha256(identity).digest()[:4])
        return Asked(prompt, request_id, temperature, top_p, longest)

    def _sample(self, jobs):
        first = jobs[0].request
        sample(self._params, self._config, [job.request.prompt for job in jobs], num_samples=1,
               max_tokens=first.max_tokens, key=jax.random.key(0), temperature=first.temperature,
               top_p=first.top_p, stop_ids=self._config.eos_ids,
               request_ids=[job.request.request_id for job in jobs], max_rows=len(jobs),
               on_finished=lambda prompt, _, result: jobs[prompt].future.set_result(result))


def _number(body, name, default, least, most):
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not least <= value <= most:
        raise ValueError(f"{name} must lie in [{least:g}, {most:g}]")
    return float(value)


def load_model(path: str | Path, dtype: str) -> tuple[dict, models.ModelConfig, object]:
    """Loads a model to serve: a Hugging Face folder, its name on the hub, or a .gguf file.

    Raises:
      ModelError: it is not there, or is none.
    """
    path = models.locate(str(path))
    params, config = models.load(path, dtype=jnp.dtype(dtype))
    return params, config, models.load_tokenizer(path)
