"""Answers to records with their judgments, kept on disk so that an evaluation can be resumed."""

import concurrent.futures
import pathlib
from collections.abc import Callable, Sequence

import jax

from memcalib_jax.api import BackgroundLoop
from memcalib_jax.data import Record
from memcalib_jax.jsonlines import JsonLines
from memcalib_jax.judge import Judge, Judgment
from memcalib_jax.training.judging import Journal, JudgePool
from memcalib_jax.training.rollouts import Policy, Prompt, SamplingConfig, roll_out

_KEYS = {"id", "domain", "sample_seed", "text", "tokens", "finish_reason"}


class Answers:
    """One response to each prompt under a seed and its judgment, written down as they come.

    `responses.jsonl` holds an object a response, `judgments.jsonl` the journal. What an earlier
    run left is kept, but for failures: failed judgments are asked again at once, and a prompt
    whose response failed is missing again.

    Attributes:
      seed: its number.
      rows: the objects of `responses.jsonl` by record id; `tokens` is None where the policy gives
        none, `num_tokens` then their number if it is known.
      missing: prompts without a response.

    Raises:
      ValueError: a file there holds something else; names it.
    """

    def __init__(self, folder: pathlib.Path, seed: int, prompts: Sequence[Prompt], judge: Judge,
                 background: BackgroundLoop):
        self.seed = seed
        self._responses = JsonLines(folder / "responses.jsonl")
        if any(not row.keys() >= _KEYS for row in self._responses.rows):
            raise ValueError(f"{folder / 'responses.jsonl'}: a line lacks one of "
                             f"{', '.join(sorted(_KEYS))}; move the file away to start again")
        # A response that failed is followed by the one that was got in its place.
        self.rows = {row["id"]: row for row in self._responses.rows}
        for record_id in [name for name, row in self.rows.items() if "failure" in row]:
            del self.rows[record_id]
        self._journal = Journal(folder / "judgments.jsonl", retry_failed=True)
        self._judges = JudgePool(judge, background, self._journal, first_sample=seed)
        self._prompts = list(prompts)
        self.missing = [prompt for prompt in prompts if prompt.record.id not in self.rows]
        for prompt in prompts:
            if prompt.record.id in self.rows:
                self._judges.submit(prompt.record, 0, self.rows[prompt.record.id]["text"])

    @property
    def judging(self) -> list[tuple[Record, concurrent.futures.Future]]:
        """The records whose responses went to the judge, and the futures of their judgments."""
        return self._judges.submitted

    def take_missing(self) -> list[Prompt]:
        """Returns the missing prompts, which the caller now answers."""
        missing, self.missing = self.missing, []
        return missing

    def generate(self, policy: Policy, sampling: SamplingConfig, key: jax.Array,
                 on_response: Callable[[int], None]):
        """Samples the missing responses.

        A prompt's index seeds its response: it draws the same numbers whether or not others are
        there already.

        Args:
          policy: the model that answers.
          sampling: how; one sample each.
          key: of this seed.
          on_response: called with the number of tokens as each response is written.
        """
        def keep(prompt, _, sample, text):
            self._write(prompt, text=text, tokens=list(sample.tokens),
                        finish_reason=sample.finish_reason)
            on_response(len(sample.tokens))

        missing = self.take_missing()
        if missing:
            roll_out(policy, missing, sampling, key, self._judges, keep)

    def add(self, prompt: Prompt, text: str, *, num_tokens: int | None = None,
            finish_reason: str | None = None):
        """Writes a response down that was made elsewhere, and has it judged."""
        self._write(prompt, text=text, tokens=None, num_tokens=num_tokens,
                    finish_reason=finish_reason)
        self._judges.submit(prompt.record, 0, text)

    def fail(self, prompt: Prompt, reason: str):
        """Notes that a prompt got no response: an invalid one, asked for again at a resume."""
        self._write(prompt, text="", tokens=None, finish_reason=None, failure=reason)
        self._judges.fail(prompt.record, 0, "", reason)

    def _write(self, prompt, **values):
        row = {"id": prompt.record.id, "domain": prompt.record.domain,
               "sample_seed": self.seed} | values
        self._responses.append(row)
        self.rows[row["id"]] = row

    def judgments(self) -> list[Judgment]:
        """Waits for the judgments and returns them, a prompt each; closes the files."""
        by_id = {record.id: future.result() for record, future in self.judging}
        self._responses.close()
        self._journal.close()
        return [by_id[prompt.record.id] for prompt in self._prompts]
