"""The trace of a training step: what explains each token's advantage, on disk and back."""

import dataclasses
import io
import json
import pathlib
import re
import zipfile
import zlib

import numpy as np

from memcalib_jax.credit import CHANNELS, localization_signs
from memcalib_jax.data import sentence_ids_of_text

FORMAT = "memcalib_jax.trace/1"
_DOCUMENT = "document"


class DamagedTrace(ValueError):
    """A file is no whole trace; names it and says what to do."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """One training step.

    Suffixes: `_R` responses, `_C` nine channels, `_N` tokens, `_S` scored pairs.

    Tokens are those of all responses, one after another; `tokens_of` finds a response's. Every
    (response, channel) that was scored is a pair; `pair_tokens` finds a pair's values.

    Attributes:
      step: from 1.
      settings: constants of the credit assignment: `method`, `mode`, `granularity`,
        `merge_overuse`, `eta_C` and `channel_weights_C` (nine numbers each), `cap`,
        `max_difference`, `min_signal`, `min_sentence_signal`, `coverage_power`, `epsilon`,
        `min_std`.
      rms: the batch's scale sigma_S, Eq. (1), arXiv 2609.24259; None for GRPO.
      entropy: mean over the step's tokens of the policy's entropy during the update, nats.
      noise: root mean square of differences that mean nothing, nats; None without counterfactuals.
      records: of each prompt `id`, `question` and `atoms`, each with `id`, `text` and `ideal`.
      responses: of each response `text`, `finish_reason` and, if it could not be judged, `reason`.
      record_R: int32, each response's place in `records`.
      sample_R: int32, its number within the prompt's group.
      valid_R: bool, whether it has a judgment.
      length_R: int32, its tokens, the stop token included.
      actual_R_A: int8, the judged level of the record's atoms; -1 behind their end and where
        invalid.
      rewards_R_C: float32 channel rewards, 0 for invalid responses.
      channel_advantages_R_C: float32, normalized within the group, before weights and RMS; 0 for
        GRPO, which normalizes their sum.
      signal_gate_R_C, direction_gate_R_C: bool.
      fallback_R_C: int8, the codes of `CreditDiagnostics`; without counterfactuals 1 where the
        channel is empty and 3 elsewhere.
      thresholds_C: float32, those used in this step, nats.
      sentence_thresholds_C: the same of sentences; None at token granularity.
      token_N: int32 token ids.
      token_end_N: int32, where each token ends in its response's text.
      advantage_N: float32 token advantages.
      sentence_N: int32 sentences; None where the step had none.
      stop_N: bool stop tokens that were no candidates of under-use; None where the step had none.
      pair_response_S, pair_channel_S: int32, which response and channel a pair is.
      difference: float32, d = log p(full) - log p(ablated) of each pair's tokens in turn, nats.
      multiplier: float32, the projected multipliers of the tokens of each localized pair in turn;
        those of the others are 1.
    """

    step: int
    settings: dict
    rms: float | None
    entropy: float
    noise: float | None
    records: list[dict]
    responses: list[dict]
    record_R: np.ndarray
    sample_R: np.ndarray
    valid_R: np.ndarray
    length_R: np.ndarray
    actual_R_A: np.ndarray
    rewards_R_C: np.ndarray
    channel_advantages_R_C: np.ndarray
    signal_gate_R_C: np.ndarray
    direction_gate_R_C: np.ndarray
    fallback_R_C: np.ndarray
    thresholds_C: np.ndarray
    token_N: np.ndarray
    token_end_N: np.ndarray
    advantage_N: np.ndarray
    pair_response_S: np.ndarray
    pair_channel_S: np.ndarray
    difference: np.ndarray
    multiplier: np.ndarray
    sentence_thresholds_C: np.ndarray | None = None
    sentence_N: np.ndarray | None = None
    stop_N: np.ndarray | None = None

    def __post_init__(self):
        starts = np.concatenate([[0], np.cumsum(self.length_R, dtype=np.int64)])
        pair_length = self.length_R[self.pair_response_S].astype(np.int64)
        kept = np.where(self.localized_S, pair_length, 0)
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_pair_starts", np.concatenate([[0], np.cumsum(pair_length)]))
        object.__setattr__(self, "_multiplier_starts", np.concatenate([[0], np.cumsum(kept)]))

    @property
    def localized_S(self) -> np.ndarray:
        """bool, the pairs whose credit was moved."""
        return self.fallback_R_C[self.pair_response_S, self.pair_channel_S] == 0

    def name(self, response: int) -> str:
        """Returns `<record id>/<sample>`, which names a response within a step."""
        return f"{self.records[self.record_R[response]]['id']}/{self.sample_R[response]}"

    def find(self, name: str) -> int:
        """Returns the response of a name.

        Raises:
          KeyError: there is none.
        """
        for response in range(len(self.record_R)):
            if self.name(response) == name:
                return response
        raise KeyError(name)

    def tokens_of(self, response: int) -> slice:
        """Returns where in arrays `_N` the tokens of a response are."""
        return slice(int(self._starts[response]), int(self._starts[response + 1]))

    def token_texts(self, response: int) -> list[str]:
        """Returns the text of each token; together they are the response's."""
        ends = self.token_end_N[self.tokens_of(response)]
        text = self.responses[response]["text"]
        return [text[start:end] for start, end in zip([0, *ends[:-1]], ends)]

    def sentences_of(self, response: int) -> np.ndarray:
        """Returns the sentence of each token, int32 [T]: the step's own, else found in the text."""
        where = self.tokens_of(response)
        if self.sentence_N is not None:
            return self.sentence_N[where]
        return sentence_ids_of_text(
            self.responses[response]["text"], self.token_end_N[where].tolist())

    def atoms_of(self, response: int, channel: int) -> list[dict]:
        """Returns the record's atoms that the channel holds in this response."""
        merged = self.settings["merge_overuse"]
        atoms = self.records[self.record_R[response]]["atoms"]
        return [atom for atom, actual in zip(atoms, self.actual_R_A[response])
                if _channel(atom["ideal"], actual, merged) == channel]

    def pair_of(self, response: int, channel: int) -> int | None:
        """Returns the pair of a response and a channel; None if it was not scored."""
        found = np.flatnonzero(
            (self.pair_response_S == response) & (self.pair_channel_S == channel))
        return int(found[0]) if len(found) else None

    def difference_of(self, pair: int) -> np.ndarray:
        """Returns d of a pair's tokens, float32 [T], nats."""
        return self.difference[self._pair_starts[pair]:self._pair_starts[pair + 1]]

    def multiplier_of(self, pair: int) -> np.ndarray:
        """Returns the multipliers of a pair's tokens, float32 [T]."""
        if not self.localized_S[pair]:
            return np.ones(self.length_R[self.pair_response_S[pair]], np.float32)
        return self.multiplier[self._multiplier_starts[pair]:self._multiplier_starts[pair + 1]]

    def clipped_of(self, pair: int) -> np.ndarray:
        """Returns the aligned, clipped signals of a pair's tokens, float64 [T], nats (3.2)."""
        limit = self.settings["max_difference"]
        return np.clip(self._signal(pair), -limit, limit)

    def score_of(self, pair: int) -> np.ndarray:
        """Returns q of a pair's tokens, float64 [T] (3.2; at sentence granularity q_j / L_j, H.2).

        The gates are not looked at: where one is shut the scores moved nothing.
        """
        signal, clipped = self._signal(pair), self.clipped_of(pair)
        channel, response = self.pair_channel_S[pair], self.pair_response_S[pair]
        candidate = np.array([not reason for reason in self.barred_of(pair)], bool)
        threshold = float(self.thresholds_C[channel])
        if self.settings["granularity"] == "token":
            return np.where(candidate, np.maximum(clipped - threshold, 0.0), 0.0)
        sentence = self.sentence_N[self.tokens_of(response)]
        score = np.zeros(len(signal))
        for number in np.unique(sentence[candidate]):
            chosen = candidate & (sentence == number)
            above = max(clipped[chosen].mean() - float(self.sentence_thresholds_C[channel]), 0.0)
            coverage = np.mean(signal[chosen] > threshold)
            score[chosen] = (above * coverage ** self.settings["coverage_power"]) / chosen.sum()
        return score

    def barred_of(self, pair: int) -> list[str]:
        """Returns why each of a pair's tokens is no candidate; "" for candidates."""
        channel, response = self.pair_channel_S[pair], self.pair_response_S[pair]
        reasons = [""] * int(self.length_R[response])
        if channel // 3 <= channel % 3:  # no under-use
            return reasons
        if self.stop_N is not None:
            reasons = ["a stop token" if stop else "" for stop in self.stop_N[
                self.tokens_of(response)]]
        if self.settings["mode"] == "guarded":
            for right in _RIGHT:
                other = self.pair_of(response, right)
                if other is not None:
                    reasons = [
                        reason or (f"supported by {CHANNELS[right]}" if score > 0 else "")
                        for reason, score in zip(reasons, self.score_of(other))]
        return reasons

    def effective_of(self, pair: int) -> np.ndarray:
        """Returns `(1 - eta) + eta m` of a pair's tokens, float64 [T] (D.4)."""
        eta = self.settings["eta_C"][self.pair_channel_S[pair]]
        return 1.0 + eta * (self.multiplier_of(pair).astype(np.float64) - 1.0)

    def _signal(self, pair):
        difference = self.difference_of(pair).astype(np.float64)
        if self.settings["mode"] == "absolute":
            return np.abs(difference)
        return float(_signs(self.settings["mode"])[self.pair_channel_S[pair]]) * difference


# Right use that is localized.
_RIGHT = (CHANNELS.index("B+"), CHANNELS.index("C+"))


def _signs(mode):
    return np.asarray(localization_signs(mode))


def _channel(ideal, actual, merged):
    if actual < 0:
        return None
    return 1 if merged and ideal == 0 and actual > 0 else 3 * ideal + actual


_FIELDS = [field.name for field in dataclasses.fields(Trace)]
_IN_DOCUMENT = ("step", "settings", "rms", "entropy", "noise", "records", "responses")
_OPTIONAL = ("sentence_thresholds_C", "sentence_N", "stop_N")


def to_bytes(trace: Trace) -> bytes:
    """Returns a trace as a compressed NumPy archive without pickles.

    Arrays have the names of the attributes; `document` holds the other attributes as JSON, in
    bytes of ASCII.
    """
    document = {"format": FORMAT} | {name: getattr(trace, name) for name in _IN_DOCUMENT}
    arrays = {name: getattr(trace, name) for name in _FIELDS if name not in _IN_DOCUMENT}
    # ASCII: a decoder may leave half of a surrogate pair, which has no UTF-8.
    arrays[_DOCUMENT] = np.frombuffer(json.dumps(document).encode("ascii"), np.uint8)
    data = io.BytesIO()
    np.savez_compressed(data, **{name: a for name, a in arrays.items() if a is not None})
    return data.getvalue()


def load_trace(path) -> Trace:
    """Reads a trace; needs neither the model nor its tokenizer.

    Raises:
      DamagedTrace: the file is missing, cut off, damaged or no trace.
    """
    path = pathlib.Path(path)
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        document = json.loads(arrays.pop(_DOCUMENT).tobytes())
        if document.pop("format") != FORMAT:
            raise DamagedTrace(f"{path}: not of format {FORMAT}; it is from another version")
        trace = Trace(**document, **arrays)
        _check(trace)
    except OSError as error:
        raise DamagedTrace(f"{path} cannot be read ({error.strerror}); traces are written by "
                           "experiments.train_rl, unless --notrace") from None
    except DamagedTrace:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, EOFError, zlib.error,
            zipfile.BadZipFile, NotImplementedError):
        raise DamagedTrace(f"{path} is cut off, damaged or no trace; remove it to leave its step "
                           "out, or let the run do the step again") from None
    return trace


def _check(trace):
    """Raises ValueError where sizes do not fit together."""
    responses, tokens = len(trace.length_R), int(trace.length_R.sum())
    pairs = len(trace.pair_response_S)
    for name in _FIELDS:
        value = getattr(trace, name)
        if name in _OPTIONAL and value is None:
            continue
        for suffix, size in (("R", responses), ("N", tokens), ("S", pairs)):
            if name.split("_")[-1] == suffix and len(value) != size:
                raise ValueError(name)
        if "_R_C" in name and value.shape != (responses, len(CHANNELS)):
            raise ValueError(name)
    if (len(trace.responses) != responses or len(trace.actual_R_A) != responses
            or len(trace.difference) != trace._pair_starts[-1]
            or len(trace.multiplier) != trace._multiplier_starts[-1]):
        raise ValueError("sizes")


def trace_path(run_dir, step: int) -> pathlib.Path:
    """Returns where a run keeps the trace of a step."""
    return pathlib.Path(run_dir) / "traces" / f"step_{step}.npz"


def trace_steps(run_dir) -> tuple[list[int], list[int]]:
    """Returns the steps of a run that have a trace, and those up to the last that have none.

    Raises:
      DamagedTrace: no step has one.
    """
    folder = pathlib.Path(run_dir) / "traces"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    matches = [re.fullmatch(r"step_([1-9]\d*)\.npz", name) for name in names]
    steps = sorted(int(match[1]) for match in matches if match)
    if not steps:
        raise DamagedTrace(f"{folder} has no trace; they are written by experiments.train_rl, "
                           "unless --notrace")
    return steps, sorted(set(range(1, steps[-1] + 1)) - set(steps))
