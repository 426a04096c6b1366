import dataclasses
import io

import numpy as np
import pytest
import trace_oracle
from made_traces import C, traced

from memcalib_jax.evaluation.trace import (
    DamagedTrace,
    load_trace,
    to_bytes,
    trace_path,
    trace_steps,
)
from memcalib_jax.files import write_atomically


@pytest.mark.parametrize("settings", [
    {}, {"mode": "absolute"}, {"mode": "positive_only"}, {"granularity": "sentence"},
    {"stops": True}, {"granularity": "sentence", "stops": True, "mode": "absolute"},
    {"merge": True}, {"mode": "guarded", "stops": True},
    {"mode": "guarded", "stops": True, "granularity": "sentence"}])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_advantage_can_be_recomputed(settings, seed, tmp_path):
    path = tmp_path / "step_4.npz"
    write_atomically(path, to_bytes(traced(**settings, seed=seed)))
    trace = load_trace(path)
    advantages, multipliers, scores = trace_oracle.advantages(trace)
    np.testing.assert_allclose(trace.advantage_N, advantages, rtol=1e-5, atol=2e-5)
    assert list(multipliers) == list(np.flatnonzero(trace.localized_S)) and len(multipliers) > 4
    for pair, expected in multipliers.items():
        np.testing.assert_allclose(trace.multiplier_of(pair), expected, atol=2e-5)
    for pair, expected in scores.items():
        np.testing.assert_allclose(trace.score_of(pair), expected, atol=1e-12)
    assert trace.rms == pytest.approx(np.sqrt(np.mean(
        (trace.channel_advantages_R_C @ trace.settings["channel_weights_C"])[trace.valid_R] ** 2)
        + 1e-6), rel=1e-6)


@pytest.mark.parametrize("method", ["gdpo", "grpo"])
def test_a_trace_without_counterfactuals(method, tmp_path):
    path = tmp_path / "step_4.npz"
    write_atomically(path, to_bytes(traced(method=method)))
    trace = load_trace(path)
    assert trace.settings["method"] == method and not len(trace.difference)
    if method == "gdpo":
        expected, _, _ = trace_oracle.advantages(trace)
    else:
        total = trace.rewards_R_C.sum(axis=1, keepdims=True)
        expected = np.repeat(trace_oracle.z_scores(
            total, trace.valid_R, trace.record_R, 1e-6, 1e-6), trace.length_R)
        assert trace.rms is None
    np.testing.assert_allclose(trace.advantage_N, expected, rtol=1e-5, atol=1e-6)


def test_what_a_trace_says_of_a_response():
    trace = traced()
    response = trace.find("r1/3")
    assert response == 8 and trace.name(8) == "r1/3"
    with pytest.raises(KeyError):
        trace.find("r1/5")
    texts = trace.token_texts(response)
    assert texts[:-1] == [f" w{token}" for token in trace.token_N[trace.tokens_of(response)][:-1]]
    assert texts[-1] == "" and "".join(texts) == trace.responses[response]["text"]
    held = [trace.atoms_of(response, channel) for channel in range(C)]
    assert sorted(atom["id"] for atoms in held for atom in atoms) == ["a0", "a1", "a2", "a3"]
    for channel, atoms in enumerate(held):
        assert bool(atoms) == (trace.rewards_R_C[response, channel] != 0)
    invalid = trace.find("r1/2")
    assert trace.responses[invalid]["reason"] == "timeout: 300 s"
    assert not trace.advantage_N[trace.tokens_of(invalid)].any()
    assert all(trace.pair_of(invalid, channel) is None for channel in range(C))
    assert trace.atoms_of(invalid, 0) == []


def test_values_of_a_pair_by_hand():
    trace = traced()
    pair = trace.pair_of(trace.pair_response_S[0], trace.pair_channel_S[0])
    assert pair == 0
    length = trace.length_R[trace.pair_response_S[0]]
    channel = np.int32(7)  # under-use CB-: suppressed tokens, threshold 0.265
    only = dataclasses.replace(
        trace, pair_response_S=trace.pair_response_S[:1], pair_channel_S=np.array([channel]),
        difference=np.array([0.5] * (length - 1) + [-5.0], np.float32),
        fallback_R_C=np.full_like(trace.fallback_R_C, 6), multiplier=np.zeros(0, np.float32))
    assert only.clipped_of(0).tolist() == [-0.5] * (length - 1) + [3.0]
    assert only.score_of(0)[-1] == pytest.approx(3 - trace.thresholds_C[7])
    assert only.score_of(0)[:-1].sum() == 0
    assert only.multiplier_of(0).tolist() == only.effective_of(0).tolist() == [1.0] * length


def test_the_archive_needs_no_pickle_and_names_its_arrays(tmp_path):
    path = tmp_path / "step_4.npz"
    path.write_bytes(to_bytes(traced()))
    with np.load(path, allow_pickle=False) as archive:
        assert {"token_N", "difference", "document"} <= set(archive.files)
        assert archive["difference"].dtype == np.float32
        assert b"question 0?" in archive["document"].tobytes()
    assert to_bytes(load_trace(path)) == path.read_bytes()


@pytest.mark.parametrize("damage", ["half", "tail", "flip", "empty", "text", "other", "array",
                                    "short", "format"])
def test_a_damaged_trace_is_named(damage, tmp_path):
    path = tmp_path / "step_4.npz"
    trace = traced()
    data = to_bytes(trace)
    middle = data.index(b"difference.npy") + 2000
    damaged = {
        "half": lambda: data[:len(data) // 2], "tail": lambda: data[:-1],
        "flip": lambda: data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1:],
        "empty": lambda: b"", "text": lambda: b"no archive",
        "other": lambda: _archive(numbers=np.arange(3)), "array": lambda: _archive_array(),
        "short": lambda: to_bytes(dataclasses.replace(trace, difference=trace.difference[:-1])),
        "format": lambda: data}
    path.write_bytes(damaged[damage]())
    if damage == "format":
        with np.load(path) as archive:
            arrays = dict(archive)
        text = arrays["document"].tobytes().replace(b"trace/1", b"trace/0")
        path.write_bytes(_archive(**arrays | {"document": np.frombuffer(text, np.uint8)}))
    with pytest.raises(DamagedTrace, match="step_4.npz"):
        load_trace(path)


def _archive(**arrays):
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)
    return data.getvalue()


def _archive_array():
    data = io.BytesIO()
    np.save(data, np.arange(3))
    return data.getvalue()


def test_steps_with_and_without_a_trace(tmp_path):
    with pytest.raises(DamagedTrace, match="traces has no trace"):
        trace_steps(tmp_path)
    with pytest.raises(DamagedTrace, match="step_1.npz cannot be read"):
        load_trace(trace_path(tmp_path, 1))
    for step in (2, 3, 11):
        write_atomically(trace_path(tmp_path, step), b"")
    (tmp_path / "traces" / ".step_5.npz.77.tmp").write_bytes(b"")
    (tmp_path / "traces" / "step_x.npz").write_bytes(b"")
    assert trace_steps(tmp_path) == ([2, 3, 11], [1, 4, 5, 6, 7, 8, 9, 10])
