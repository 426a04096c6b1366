"""Kernels against dense rows in float64 and tiles in XLA, interpreted; and compiled for a TPU."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from memcalib_jax.models import pallas_attention
from memcalib_jax.models.attention import Segments, attention_form, over_bins, packed_attention
from memcalib_jax.models.pallas_attention import Cut, attend_blocks, spans_of, stretches, visited
from memcalib_jax.models.tile_attention import ATTENTION_RESULTS, attend_tiles

SIZE = 61
# (start, length, [(ancestor start, seen), ...]). Places of no segment: the last ones of each.
TREES = {
    "row": [(0, 57, [])],
    "responses": [(0, 30, []), (30, 11, [(0, 30)]), (41, 1, [(0, 30)]), (42, 17, [(0, 30)])],
    # A spine of 21, a variant that leaves it at 13, responses under both, an empty segment.
    "variants": [(0, 21, []), (21, 9, [(0, 13)]), (30, 1, [(0, 21)]), (31, 12, [(0, 21)]),
                 (43, 15, [(0, 13), (21, 9)]), (0, 0, [])],
    "nothing": [(0, 0, []), (5, 0, [(0, 0)])],
}


def layout(*trees):
    """Returns start, length and ancestors of bins, with as much room as the fullest needs."""
    room = max(len(tree) for tree in trees)
    spans, ancestors = np.zeros((len(trees), room, 2), int), np.zeros((len(trees), room, 2, 2), int)
    for bin_, tree in enumerate(trees):
        for i, (start, length, seen) in enumerate(tree):
            spans[bin_, i] = start, length
            ancestors[bin_, i, :len(seen)] = np.reshape(seen, (-1, 2))
    return [jnp.asarray(x, jnp.int32) for x in (
        spans[..., 0], spans[..., 1], ancestors[..., 0], ancestors[..., 1])]


def mask_of(tree, size):
    """Returns who sees whom, bool `[size, size]`, straight from the definition."""
    mask = np.zeros((size, size), bool)
    for start, length, ancestors in tree:
        for query in range(start, start + length):
            mask[query, start:query + 1] = True
            for first, seen in ancestors:
                mask[query, first:first + seen] = True
    return mask


def dense(mask, q, k, v, cotangent):
    """Returns one bin's attention and the gradients of sum(out * cotangent), in float64."""
    q, k, v, cotangent = (np.asarray(x, np.float64) for x in (q, k, v, cotangent))
    scale = q.shape[-1] ** -0.5
    scores = np.where(mask[:, None, None], np.einsum("nhrd,mhd->nhrm", q, k) * scale, -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e300))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("nhrm,mhd->nhrd", weights, v)
    d_weights = np.einsum("nhrd,mhd->nhrm", cotangent, v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * scale
    return (out, np.einsum("nhrm,mhd->nhrd", d_scores, k),
            np.einsum("nhrm,nhrd->mhd", d_scores, q),
            np.einsum("nhrm,nhrd->mhd", weights, cotangent))


def inputs(bins=1, size=SIZE, heads=2, repeats=3, dim=8, *, seed=0, scale=2.0,
           dtype=jnp.float32):
    random = np.random.RandomState(seed)
    queries, keys = (bins, size, heads, repeats, dim), (bins, size, heads, dim)
    q, k, v, cotangent = (random.standard_normal(shape).astype(np.float32)
                          for shape in (queries, keys, keys, queries))
    return (jnp.asarray(q * scale), *(jnp.asarray(x * scale, dtype) for x in (k, v)),
            jnp.asarray(cotangent))


def by_kernels(q, k, v, segments):
    return attend_blocks(q, k, v, *segments, interpret=True)


def by_tiles(q, k, v, segments):
    return over_bins(attend_tiles, q, k, v, *segments)


def with_gradients(attend, segments):
    """Returns the compiled function of q, k, v and a cotangent: out and the three gradients."""
    def run(q, k, v, cotangent):
        out, pull = jax.vjp(lambda *x: attend(*x, segments), q, k, v)
        return out, *pull(cotangent)

    return jax.jit(run)


@pytest.fixture
def small_spans(monkeypatch):
    """Cuts the small bins of these tests into many tiles and blocks."""
    monkeypatch.setattr(pallas_attention, "spans_of", lambda *_: (8, 16))


@pytest.mark.parametrize("tree, heads, repeats, dim, spans", [
    ("row", 1, 4, 8, (8, 16)), ("responses", 2, 3, 8, (8, 16)), ("variants", 2, 1, 4, (8, 16)),
    ("variants", 1, 2, 8, (16, 8)), ("variants", 1, 2, 8, (1, 4)), ("variants", 3, 2, 8, (64, 64)),
    ("nothing", 1, 2, 4, (8, 16))])
def test_equals_dense_rows(monkeypatch, tree, heads, repeats, dim, spans):
    monkeypatch.setattr(pallas_attention, "spans_of", lambda *_: spans)
    values = inputs(1, SIZE, heads, repeats, dim)
    ours = with_gradients(by_kernels, layout(TREES[tree]))(*values)
    theirs = dense(mask_of(TREES[tree], SIZE), *(x[0] for x in values))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one[0], other, atol=2e-5)


def test_equals_tiles_in_xla():
    """With the spans of a TPU: bins of three tiles and two blocks, in part full."""
    segments = layout([(0, 400, []), (400, 150, [(0, 390)]), (550, 140, [(0, 400)])],
                      [(0, 301, []), (301, 64, [(0, 100)]), (365, 200, [(0, 100), (301, 60)])])
    values = inputs(2, 700, 1, 4, 16)
    ours, theirs = (with_gradients(attend, segments)(*values) for attend in (by_kernels, by_tiles))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-5)


def test_bfloat16_products_accumulate_in_float32(small_spans):
    values = inputs(scale=1.0, dtype=jnp.bfloat16)
    ours = with_gradients(by_kernels, layout(TREES["variants"]))(*values)
    assert [x.dtype for x in ours] == [jnp.float32] * 2 + [jnp.bfloat16] * 2
    theirs = dense(mask_of(TREES["variants"], SIZE), *(x[0] for x in values))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one[0].astype(jnp.float32), other, atol=0.03)


def test_large_scores_stay_finite(small_spans):
    values = inputs(scale=200.0)
    ours = with_gradients(by_kernels, layout(TREES["variants"]))(*values)
    theirs = dense(mask_of(TREES["variants"], SIZE), *(x[0] for x in values))
    for one, other in zip(ours, theirs, strict=True):
        assert np.all(np.isfinite(one))
        np.testing.assert_allclose(one[0], other, rtol=1e-3, atol=0.1)


def test_what_a_token_does_not_see_has_no_influence(small_spans):
    q, k, v, cotangent = inputs()
    run = with_gradients(by_kernels, layout(TREES["variants"]))
    for query in (5, 29, 33, 50, 59):
        unseen = ~mask_of(TREES["variants"], SIZE)[query]
        only = cotangent.at[:, np.arange(SIZE) != query].set(0.0)
        clean, dirty = run(q, k, v, only), run(
            q, *(x.at[:, unseen].set(1e6) for x in (k, v)), only)
        for ours, theirs in zip(dirty[:2], clean[:2], strict=True):
            np.testing.assert_array_equal(ours[:, query], theirs[:, query])
        for gradient in clean[2:]:
            np.testing.assert_array_equal(gradient[:, unseen], 0.0)


def test_tokens_of_no_segment_are_zero(small_spans):
    out, d_q, _, _ = with_gradients(by_kernels, layout(TREES["variants"]))(*inputs())
    np.testing.assert_array_equal(out[:, 58:], 0.0)
    np.testing.assert_array_equal(d_q[:, 58:], 0.0)


@pytest.mark.parametrize("tree", TREES)
def test_visited_are_the_blocks_that_hold_something_seen(tree):
    cut = Cut(8, 16, True)
    found = visited(*stretches(64, *layout(TREES[tree])), cut)[0]
    mask = mask_of(TREES[tree], 64).reshape(8, 8, 4, 16)
    np.testing.assert_array_equal(found, mask.any(axis=(1, 3)))


@pytest.mark.parametrize("size, repeats, key_bytes, spans", [
    (8192, 4, 256, (256, 512)), (8192, 7, 256, (128, 512)), (8192, 1, 128, (512, 512)),
    (8192, 8, 512, (128, 256)), (8192, 16, 512, (128, 128)), (100, 4, 256, (128, 128)),
    (300, 4, 256, (256, 512))])
def test_spans_follow_heads_and_room(size, repeats, key_bytes, spans):
    assert spans_of(size, repeats, key_bytes) == spans


def test_the_form_is_chosen_in_a_context():
    """One function, traced anew in each context."""
    groups = (Segments(*layout(TREES["variants"]), query_size=SIZE),)
    attend = jax.jit(lambda q, k, v: packed_attention(q, k, v, groups))
    q, k, v, _ = inputs(1, SIZE, 2, 2)
    values = q.reshape(1, SIZE, 4, 8), k, v
    results, kernels = {}, {}
    for form in ("auto", "xla", "pallas"):
        with attention_form(form):
            results[form] = attend(*values)
            kernels[form] = "pallas_call" in str(attend.trace(*values).jaxpr)
    assert kernels == {"auto": False, "xla": False, "pallas": True}
    np.testing.assert_array_equal(results["auto"], results["xla"])
    np.testing.assert_allclose(results["pallas"], results["xla"], atol=2e-5)


def test_every_mesh_equals_one_device():
    """The device count must be fixed before jax starts, so this runs in a process of its own."""
    program = Path(__file__).with_name("sharded_attention.py")
    process = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(program.parents[2])})
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.strip() == "every mesh equals one device"


@pytest.fixture
def libtpu(monkeypatch):
    """Skips without the TPU compiler; one process may use it beside another, as there is no TPU."""
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def kernels_for_a_tpu(heads, repeats, dim, dtype, **checkpoint):
    """Returns how many kernels a bin's attention and its gradients are, compiled for a TPU."""
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    on_chip = SingleDeviceSharding(device)
    shapes = jax.eval_shape(lambda: inputs(1, 1000, heads, repeats, dim, dtype=dtype))
    attend = jax.checkpoint(
        lambda *x: attend_blocks(*x, *layout(TREES["variants"])), **checkpoint)

    def run(q, k, v, cotangent):
        # The loop keeps apart what is computed before and what once more.
        _, pull = jax.vjp(lambda *x: jax.lax.scan(
            lambda out, _: (out + attend(q + out, *x), None), cotangent, length=2)[0], k, v)
        return pull(cotangent)

    program = jax.jit(run).lower(*(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_chip) for x in shapes)).compile()
    return program.as_text().count('custom_call_target="tpu_custom_call"')


@pytest.mark.parametrize("heads, repeats, dim, dtype", [
    (1, 4, 128, jnp.bfloat16), (1, 7, 128, jnp.float32), (2, 3, 64, jnp.bfloat16),
    (1, 8, 256, jnp.bfloat16), (1, 8, 256, jnp.float32)])
def test_compiles_for_a_tpu(libtpu, heads, repeats, dim, dtype):
    assert kernels_for_a_tpu(heads, repeats, dim, dtype) == 4


def test_what_a_policy_keeps_is_not_computed_again(libtpu):
    policy = jax.checkpoint_policies.save_only_these_names(ATTENTION_RESULTS)
    assert kernels_for_a_tpu(1, 4, 128, jnp.bfloat16, policy=policy) == 3
