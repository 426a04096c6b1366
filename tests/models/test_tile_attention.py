"""Tiles and blocks against whole rows of scores in float64, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax.models import tile_attention
from memcalib_jax.models.tile_attention import attend_tiles

SIZE, KEY_HEADS, REPEATS, DIM = 61, 2, 3, 8
# (start, length, [(ancestor start, seen), ...]): a spine of 21, a variant that leaves it at 13,
# responses under both, an empty segment, and places 58 to 60 of no segment.
SEGMENTS = [
    (0, 21, []), (21, 9, [(0, 13)]), (30, 1, [(0, 21)]), (31, 12, [(0, 21)]),
    (43, 15, [(0, 13), (21, 9)]), (0, 0, [])]


def layout(dtype=np.int32):
    ancestors = np.zeros((len(SEGMENTS), 2, 2), dtype)
    for i, (_, _, seen) in enumerate(SEGMENTS):
        ancestors[i, :len(seen)] = np.reshape(seen, (-1, 2))
    start, length = np.array([segment[:2] for segment in SEGMENTS], dtype).T
    return start, length, ancestors[..., 0], ancestors[..., 1]


def seen_by(place):
    """Lists the keys that the token at `place` sees, straight from the definition."""
    for start, length, ancestors in SEGMENTS:
        if start <= place < start + length:
            return [key for first, seen in ancestors for key in range(first, first + seen)
                    ] + list(range(start, place + 1))
    return []


def whole_rows(q, k, v, cotangent):
    """Returns the attention of every token and the gradients of sum(out * cotangent), float64."""
    q, k, v, cotangent = (np.asarray(x, np.float64) for x in (q, k, v, cotangent))
    out, d_q, d_k, d_v = (np.zeros_like(x) for x in (q, q, k, v))
    for place in range(SIZE):
        keys = seen_by(place)
        for head in range(KEY_HEADS if keys else 0):
            for repeat in range(REPEATS):
                at = place, head, repeat
                scores = k[keys, head] @ q[at] / DIM ** 0.5
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[at] = weights @ v[keys, head]
                d_weights = v[keys, head] @ cotangent[at]
                d_scores = weights * (d_weights - weights @ d_weights) / DIM ** 0.5
                d_q[at] = d_scores @ k[keys, head]
                np.add.at(d_k[:, head], keys, d_scores[:, None] * q[at])
                np.add.at(d_v[:, head], keys, weights[:, None] * cotangent[at])
    return out, d_q, d_k, d_v


def inputs(seed=0, scale=2.0):
    random = np.random.RandomState(seed)
    shapes = [(SIZE, KEY_HEADS, REPEATS, DIM)] + [(SIZE, KEY_HEADS, DIM)] * 2
    q, k, v = (jnp.asarray(random.standard_normal(s) * scale, jnp.float32) for s in shapes)
    return q, k, v, jnp.asarray(random.standard_normal(shapes[0]), jnp.float32)


def with_gradients(q, k, v, cotangent):
    out, pull = jax.vjp(lambda q, k, v: attend_tiles(q, k, v, *layout()), q, k, v)
    return out, *pull(cotangent.astype(out.dtype))


@pytest.mark.parametrize("span", [128, 32, 8, 5, 3, 1])
def test_equals_whole_rows(monkeypatch, span):
    monkeypatch.setattr(tile_attention, "span_of", lambda *_: span)
    values = inputs(seed=span)
    for ours, theirs in zip(jax.jit(with_gradients)(*values), whole_rows(*values), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("size, segments, span", [
    (512, 32, 32), (1024, 64, 64), (1536, 96, 64), (2048, 128, 128), (8192, 512, 128),
    (128, 8, 32), (512, 1, 128)])
def test_spans_follow_the_room(size, segments, span):
    assert tile_attention.span_of(size, segments) == span


def test_tokens_of_no_segment_are_zero_and_have_no_influence(monkeypatch):
    monkeypatch.setattr(tile_attention, "span_of", lambda *_: 8)
    q, k, v, cotangent = inputs()
    poisoned = [x.at[58:].set(1e6) for x in (q, k, v)]
    clean, dirty = with_gradients(q, k, v, cotangent), with_gradients(*poisoned, cotangent)
    np.testing.assert_array_equal(dirty[0][58:], 0)
    for ours, theirs in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(ours[:58], theirs[:58])


def test_bfloat16_products_accumulate_in_float32():
    q, k, v, cotangent = inputs(scale=1.0)
    k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    out, d_q, d_k, d_v = with_gradients(q, k, v, cotangent)
    assert (out.dtype, d_q.dtype, d_k.dtype, d_v.dtype) == (
        jnp.float32, jnp.float32, jnp.bfloat16, jnp.bfloat16)
    for ours, theirs in zip((out, d_q, d_k, d_v), whole_rows(q, k, v, cotangent), strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, atol=0.03)


def test_large_scores_stay_finite():
    q, k, v, cotangent = inputs(scale=200.0)
    for ours, theirs in zip(with_gradients(q, k, v, cotangent),
                            whole_rows(q, k, v, cotangent), strict=True):
        assert np.all(np.isfinite(ours))
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=0.1)


def test_bins_side_by_side_equal_bins_in_turn():
    """Under vmap, as on accelerators, loops run as long as the longest bin's."""
    first, second = inputs(seed=3), inputs(seed=4)
    start, length, ancestor_start, ancestor_length = layout()
    shorter = np.where(length > 12, 12, length)
    lengths = np.stack([length, shorter])

    def one(q, k, v, length):
        return attend_tiles(q, k, v, start, length, ancestor_start, ancestor_length)

    both = [jnp.stack(pair) for pair in zip(first, second)][:3]
    together = jax.vmap(one)(*both, lengths)
    for i, values in enumerate((first, second)):
        np.testing.assert_allclose(together[i], one(*values[:3], lengths[i]), atol=1e-6)
