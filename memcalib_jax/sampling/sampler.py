"""Sampling responses: the host's part, which admits, collects and compacts between blocks."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from memcalib_jax.models import ModelConfig
from memcalib_jax.models.on_mesh import num_row_shards
from memcalib_jax.models.stack import separate_layers
from memcalib_jax.sampling.decode import (
    Request, admit, decode_block, reshape_rows, vacant_rows)
from memcalib_jax.sampling.draw import Rule

BLOCK_STEPS = 16
PREFILL_TOKENS = 4096
# Each further size is another program to compile: below these there is nothing to save. A step
# of few rows takes as long as reading the weights does.
FEWEST_ROWS = 16
SMALLEST_TAIL = 128
SMALLEST_PROMPT = 64
STOP_IDS_MULTIPLE = 8


@dataclasses.dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
      tokens: token ids; a stop token is the last of them.
      log_probs: float32 values in nats, one a token, under the model's whole distribution at
        the sampling temperature (at temperature 1 where that is 0), whatever top-p and top-k.
      finish_reason: "stop" if a stop token ended it, "length" if `max_tokens` did.
    """

    tokens: list[int]
    log_probs: list[float]
    finish_reason: str


@dataclasses.dataclass
class _Slot:
    """What the host knows of one prompt and those of its samples that decode together."""

    prompt: int
    sample_ids: list[int]
    tokens: list[list[int]]
    log_probs: list[list[float]]
    live: list[bool]

    def take(self, rows: list[int]) -> "_Slot":
        """Returns the slot with only `rows`, in that order; those that hold no sample come last."""
        rows = [row for row in rows if row < len(self.sample_ids)]
        return _Slot(self.prompt, *([of_row[row] for row in rows] for of_row in (
            self.sample_ids, self.tokens, self.log_probs, self.live)))


def sample(params: dict, config: ModelConfig, prompts: Sequence[Sequence[int]], *,
           num_samples: int, max_tokens: int, key: jax.Array, temperature: float = 1.0,
           top_p: float = 1.0, top_k: int = 0, stop_ids: Iterable[int],
           request_ids: Sequence[int] | None = None,
           on_finished: Callable[[int, int, Sample], None] | None = None,
           max_rows: int = 64,
           on_token: Callable[[int, int, int], None] | None = None) -> list[list[Sample]]:
    """Samples `num_samples` responses to each prompt.

    A prompt is prefilled once for all its samples. Each token takes one uniform number, folded
    from (key, request id, sample index, place in the response), so a request draws the same
    numbers whatever shares its batch; its probabilities still carry the rounding of the
    batch's shape. The same call gives the same bits.

    Args:
      params: tree of `config.parameter_shapes()`.
      config: the model's shape.
      prompts: token ids of each prompt, at least one each.
      num_samples: responses to each prompt.
      max_tokens: longest response; prompt and response together may not exceed
        `config.max_positions`.
      key: random key.
      temperature: divides the logits; 0 takes the most likely token, with log-probs at 1.
      top_p: in (0, 1], keep the fewest most likely tokens of at least this mass; ties are kept.
      top_k: keep this many most likely tokens, ties included, before `top_p`; 0 keeps all.
      stop_ids: token ids that end a response and belong to it; may be empty.
      request_ids: a number in [0, 2^32) for each prompt, by default its index. Two prompts of
        one id draw the same numbers.
      on_finished: called as `on_finished(prompt_index, sample_index, sample)` as soon as a
        response has ended, between blocks of steps, while others still decode.
      max_rows: most responses that decode at once, on each device that rows are split over. A
        prompt of more samples is split, and prefilled once for each part.
      on_token: called as `on_token(prompt_index, sample_index, token)` with every token of a
        response in order, between blocks of steps, the last before `on_finished`.

    Returns:
      For each prompt, its samples in order.

    Raises:
      ValueError: an argument is out of range; the message names it and what is allowed.
      FloatingPointError: the model's logits are not finite.
    """
    prompts = [np.asarray(prompt) for prompt in prompts]
    stop_ids = [int(token) for token in stop_ids]
    request_ids = list(range(len(prompts)) if request_ids is None else request_ids)
    _check_numbers(num_samples, max_tokens, temperature, top_p, top_k, max_rows)
    _check_prompts(prompts, request_ids, config, max_tokens)
    _check_ids("stop_ids", np.asarray(stop_ids, np.int64), config.vocab_size)

    rule = Rule(temperature=None if temperature == 0 else float(temperature),
                top_p=None if top_p == 1 else float(top_p), top_k=top_k or None)
    padding = [-1] * (_round_up(len(stop_ids) or 1, STOP_IDS_MULTIPLE) - len(stop_ids))
    request = Request(key, rule, jnp.asarray(stop_ids + padding, jnp.int32),
                      jnp.asarray(max_tokens))
    results = [[None] * num_samples for _ in prompts]

    def finish(slot: _Slot, row: int):
        stopped = slot.tokens[row][-1] in stop_ids
        finished = Sample(slot.tokens[row], slot.log_probs[row], "stop" if stopped else "length")
        slot.live[row] = False
        results[slot.prompt][slot.sample_ids[row]] = finished
        if on_finished is not None:
            on_finished(slot.prompt, slot.sample_ids[row], finished)

    run = _Run(params, config, request, prompts, request_ids, num_samples, max_tokens, max_rows,
               on_token)
    while run.waiting or run.live_slots():
        run.admit_waiting(finish)
        if run.live_slots():
            run.fit()
            run.decode(finish)
    return results


class _Run:
    """Rows on the device and the prompts that wait for them."""

    def __init__(self, params, config, request, prompts, request_ids, num_samples, max_tokens,
                 max_rows, on_token):
        parts = -(-num_samples // max_rows)
        self.group_size = -(-num_samples // parts)
        self.waiting = collections.deque(
            (prompt, list(range(start, min(start + self.group_size, num_samples))))
            for prompt in range(len(prompts))
            for start in range(0, num_samples, self.group_size))
        self.params, self.config, self.request = params, config, request
        self.separate = separate_layers(params)
        self.prompts, self.request_ids = prompts, request_ids
        self.on_token = on_token
        self.longest_tail = _round_up(max_tokens, BLOCK_STEPS)
        # Slots are split over the devices of a mesh, each with its share of them.
        self.shards = num_row_shards()
        num_slots = _round_up(min(len(self.waiting), self.shards * (max_rows // self.group_size)),
                              self.shards)
        self.slots: list[_Slot | None] = [None] * num_slots
        self.tail_lengths = np.zeros(len(self.slots), np.int64)
        self.tail_size = self._tail_bucket(BLOCK_STEPS)
        self.rows = vacant_rows(
            params, config, num_slots=len(self.slots), group_size=self.group_size,
            prompt_size=max(_prompt_bucket(len(prompt)) for prompt in prompts),
            tail_size=self.tail_size)

    def _tail_bucket(self, length):
        return max(SMALLEST_TAIL, min(self.longest_tail, 1 << (length - 1).bit_length()))

    def live_slots(self):
        return [i for i, slot in enumerate(self.slots) if slot is not None]

    def _place(self, slot, row, token, log_prob):
        if not math.isfinite(log_prob):
            raise FloatingPointError(
                f"the logits of prompt {slot.prompt}, sample {slot.sample_ids[row]}, token "
                f"{len(slot.tokens[row])} are not finite: the parameters hold NaN or infinity, "
                "or an activation overflowed")
        slot.tokens[row].append(token)
        slot.log_probs[row].append(log_prob)
        if self.on_token is not None:
            self.on_token(slot.prompt, slot.sample_ids[row], token)

    def _release(self, done, finish):
        """Finishes the rows that have ended and frees the slots without a live row."""
        for i in self.live_slots():
            slot = self.slots[i]
            for row, live in enumerate(slot.live):
                if live and done[i, row]:
                    finish(slot, row)
            if not any(slot.live):
                self.slots[i] = None

    def admit_waiting(self, finish):
        """Fills vacant slots, in chunks of a power of two prompts so that shapes stay few."""
        while self.waiting and len(self.live_slots()) < len(self.slots):
            vacant = [i for i, slot in enumerate(self.slots) if slot is None]
            size, chunk = self._next_chunk(len(vacant))
            indices = np.asarray(vacant[:len(chunk)])
            prompts = np.zeros((len(chunk), size), np.int32)
            sample_ids = np.full((len(chunk), self.group_size), -1, np.int32)
            for place, (prompt, samples) in enumerate(chunk):
                prompts[place, :len(self.prompts[prompt])] = self.prompts[prompt]
                sample_ids[place, :len(samples)] = samples
            lengths = np.asarray([len(self.prompts[prompt]) for prompt, _ in chunk], np.int32)
            ids = np.asarray([self.request_ids[prompt] for prompt, _ in chunk], np.uint32)
            self.rows, *drawn = admit(
                self.params, self.config, self.rows, self.request, indices, prompts, lengths,
                np.broadcast_to(ids[:, None], sample_ids.shape), sample_ids)
            tokens, log_probs, done = jax.device_get(drawn)
            for place, (index, (prompt, samples)) in enumerate(zip(indices, chunk)):
                slot = _Slot(prompt, samples, [[] for _ in samples], [[] for _ in samples],
                             [True] * len(samples))
                self.slots[index], self.tail_lengths[index] = slot, 0
                for row in range(len(samples)):
                    self._place(slot, row, int(tokens[place, row]),
                                float(log_probs[place, row]))
            self._release(done, finish)

    def _next_chunk(self, room):
        """Takes the prompts to prefill together; returns their padded size and them."""
        count = size = 0
        for prompt, _ in list(self.waiting)[:room]:
            wider = max(size, _prompt_bucket(len(self.prompts[prompt])))
            if count and (count + 1) * wider > PREFILL_TOKENS * self.shards:
                break
            count, size = count + 1, wider
        count = 1 << (count.bit_length() - 1)
        chunk = [self.waiting.popleft() for _ in range(count)]
        return max(_prompt_bucket(len(self.prompts[prompt])) for prompt, _ in chunk), chunk

    def fit(self):
        """Compacts to fewer rows once few are live; gives the tails room for the next block."""
        live = self.live_slots()
        longest = int(max(self.tail_lengths[live]))
        tail_size = self._tail_bucket(longest + BLOCK_STEPS)
        num_slots, group_size = len(self.slots), self.group_size
        if not self.waiting:
            each = _halved(num_slots // self.shards, len(live) / self.shards,
                           FEWEST_ROWS / group_size)
            num_slots = each * self.shards
            most_live = max(sum(self.slots[i].live) for i in live)
            group_size = _halved(group_size, most_live, FEWEST_ROWS / each)
        if (num_slots, group_size, tail_size) == (
                len(self.slots), self.group_size, self.tail_size):
            return
        kept = sorted(range(len(self.slots)), key=lambda i: self.slots[i] is None)[:num_slots]
        slots = [self.slots[i] for i in kept]
        places = [_live_first(slot, self.group_size)[:group_size] for slot in slots]
        self.rows = reshape_rows(self.rows, np.asarray(kept), np.asarray(places), tail_size)
        self.slots = [slot and slot.take(rows) for slot, rows in zip(slots, places)]
        self.tail_lengths, self.tail_size = self.tail_lengths[kept], tail_size
        self.group_size = group_size

    def decode(self, finish):
        """Decodes one block and hands out the responses that ended in it."""
        self.rows, *drawn = decode_block(
            self.separate, self.config, self.rows, self.request, BLOCK_STEPS)
        tokens, log_probs, drawn, done = jax.device_get(drawn)
        for i in self.live_slots():
            slot = self.slots[i]
            for row in range(len(slot.sample_ids)):
                for step in np.flatnonzero(drawn[:, i, row]):
                    self._place(slot, row, int(tokens[step, i, row]),
                                float(log_probs[step, i, row]))
        self.tail_lengths += BLOCK_STEPS
        self._release(done, finish)


def _halved(size, needed, fewest):
    """Returns `size` halved, rounding up, while it holds `needed` and is at least `fewest`."""
    while size > 1 and (half := -(-size // 2)) >= max(needed, fewest):
        size = half
    return size


def _live_first(slot, group_size):
    """Returns the rows of a slot, those that decode before those that ended or hold nothing."""
    live = slot.live if slot else []
    return sorted(range(group_size), key=lambda row: row >= len(live) or not live[row])


def _round_up(size, multiple):
    return -(-size // multiple) * multiple


def _prompt_bucket(length):
    """Returns the least of 64, 128, 192, 256, 384, 512, 768, ... that holds `length` tokens."""
    power = max(SMALLEST_PROMPT, 1 << (length - 1).bit_length())
    three_quarters = power * 3 // 4
    return three_quarters if SMALLEST_PROMPT < length <= three_quarters else power


def _check_numbers(num_samples, max_tokens, temperature, top_p, top_k, max_rows):
    for name, value in (("num_samples", num_samples), ("max_tokens", max_tokens),
                        ("max_rows", max_rows)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be 0 (greedy) or positive, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}; 1 keeps every token")
    if top_k < 0:
        raise ValueError(f"top_k must be 0 (keeps every token) or positive, got {top_k}")


def _check_ids(name, ids, vocab_size):
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"{name} must be a flat sequence of integer token ids")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise ValueError(f"{name} holds token id {wrong[0]}, which the model does not know: its "
                         f"vocabulary has {vocab_size} ids; was another tokenizer used?")


def _check_prompts(prompts, request_ids, config, max_tokens):
    if not prompts:
        raise ValueError("prompts is empty: give at least one prompt")
    if len(request_ids) != len(prompts):
        raise ValueError(
            f"request_ids must have one number a prompt: {len(request_ids)} for {len(prompts)}")
    for request_id in request_ids:
        if not 0 <= request_id < 2 ** 32:
            raise ValueError(f"request_ids must be in [0, 2^32), got {request_id}")
    for index, prompt in enumerate(prompts):
        if not prompt.size:
            raise ValueError(f"prompt {index} has no tokens: give at least one")
        _check_ids(f"prompt {index}", prompt, config.vocab_size)
        if len(prompt) + max_tokens > config.max_positions:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens: with max_tokens {max_tokens} it "
                f"exceeds the model's {config.max_positions} positions; shorten one of them")
