"""Samples responses and sends each to the judge the moment it ends."""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence

import jax

from memcalib_jax.data import Record, build_messages, render
from memcalib_jax.judge import Judgment
from memcalib_jax.models import ModelConfig
from memcalib_jax.parallel import gathered, multihost
from memcalib_jax.sampling import Sample, sample
from memcalib_jax.training.judging import JudgePool, judgment_from_json, judgment_to_json


@dataclasses.dataclass(frozen=True)
class Policy:
    """A model that answers: parameters in the dtype of its products, shape and tokenizer."""

    params: dict
    config: ModelConfig
    tokenizer: object


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A record rendered for the model.

    `index` is the record's place in its file: it seeds the prompt's samples, so that a record
    draws the same random numbers whatever shares its batch.
    """

    index: int
    record: Record
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn.

    `gather_weights`: on a mesh, gather the weights of its axis "fsdp" once for all tokens.
    """

    num_samples: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    gather_weights: bool = True


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Sampled responses of each prompt, `[P][G]`, and their judgments to come.

    Where the judging is `shared`, those that other processes wait for are None.
    """

    prompts: list[Prompt]
    samples: list[list[Sample]]
    texts: list[list[str]]
    pending: list[list[concurrent.futures.Future | None]]
    shared: bool = False

    def judgments(self) -> list[list[Judgment]]:
        """Waits for every judgment and returns them, `[P][G]`, the same in every process."""
        mine = [[future and future.result() for future in row] for row in self.pending]
        if not self.shared:
            return mine
        every = multihost.gather([row[0] and [judgment_to_json(judgment) for judgment in row]
                                  for row in mine])
        return [own if own[0] else [judgment_from_json(row) for row in next(filter(None, rows))]
                for own, *rows in zip(mine, *every)]

    @property
    def records(self) -> list[Record]:
        """The prompts' records."""
        return [prompt.record for prompt in self.prompts]

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(s.tokens) for row in self.samples for s in row)


def render_prompts(tokenizer, records: Sequence[Record], *, representation: str,
                   max_prompt_tokens: int) -> tuple[list[Prompt], list[str]]:
    """Renders records whole; returns the prompts that fit and the ids of those that do not."""
    prompts, too_long = [], []
    for index, record in enumerate(records):
        tokens = render(tokenizer, build_messages(record, representation=representation))
        if len(tokens) > max_prompt_tokens:
            too_long.append(record.id)
        else:
            prompts.append(Prompt(index, record, tuple(tokens)))
    return prompts, too_long


def response_text(tokenizer, tokens: Sequence[int], eos_ids: Sequence[int]) -> str:
    """Returns the text of a response without its stop token."""
    kept = tokens[:-1] if len(tokens) and tokens[-1] in eos_ids else tokens
    return tokenizer.decode(list(kept), skip_special_tokens=True)


def roll_out(policy: Policy, prompts: Sequence[Prompt], sampling: SamplingConfig,
             key: jax.Array, judges: JudgePool | None,
             on_response: Callable[[Prompt, int, Sample, str], None] | None = None) -> Rollouts:
    """Samples `num_samples` responses of each prompt; judging starts as each one ends.

    Args:
      policy: the model that answers.
      prompts: rendered records.
      sampling: how responses are drawn.
      key: folded with a prompt's index, the sample's and the position.
      judges: takes each response as it ends; None: nobody judges.
      on_response: called with (prompt, sample index, sample, text) as each response ends.
    """
    count = sampling.num_samples
    texts = [[""] * count for _ in prompts]
    pending = [[None] * count for _ in prompts]

    def finished(row: int, column: int, result: Sample):
        prompt = prompts[row]
        text = response_text(policy.tokenizer, result.tokens, policy.config.eos_ids)
        texts[row][column] = text
        if on_response is not None:
            on_response(prompt, column, result, text)
        if judges is not None and judges.takes(row):
            pending[row][column] = judges.submit(prompt.record, column, text)

    params = gathered(policy.params) if sampling.gather_weights else policy.params
    samples = sample(
        params, policy.config, [prompt.tokens for prompt in prompts],
        num_samples=count, max_tokens=sampling.max_tokens, key=key,
        temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
        stop_ids=policy.config.eos_ids, request_ids=[prompt.index for prompt in prompts],
        on_finished=finished)
    return Rollouts(list(prompts), samples, texts, pending, bool(judges and judges.shared))
