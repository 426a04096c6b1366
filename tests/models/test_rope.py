"""Rotary frequencies by hand, by a scalar oracle and by the transformers library."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax.models.layers import rotate, scale_queries
from memcalib_jax.models.rope import Linear, Llama3, QueryScale, Rope, Yarn

LLAMA3 = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192)
YARN = Yarn(factor=4.0, original_max_position_embeddings=32768)
MINISTRAL = Yarn(factor=16.0, original_max_position_embeddings=16384, mscale=1.0,
                 mscale_all_dim=1.0)
ROPES = {
    "default": (Rope(1e6), 128), "partial": (Rope(1e7, 0.25), 256),
    "linear": (Rope(1e4, scaling=Linear(4.0)), 64),
    "llama3": (Rope(5e5, scaling=LLAMA3), 128), "yarn": (Rope(1e6, scaling=YARN), 128),
    "ministral": (Rope(1e6, scaling=MINISTRAL), 128),
    "yarn exact": (Rope(1e4, scaling=dataclasses.replace(YARN, truncate=False, beta_fast=20.0)),
                   96),
    "yarn narrow": (Rope(1e4, scaling=dataclasses.replace(YARN, beta_fast=1.0)), 64),
    "yarn short": (Rope(1e4, scaling=Yarn(2.0, 4)), 64)}


def test_default_by_hand():
    """theta ** (-2 i / d), of the rotated dimensions only."""
    np.testing.assert_allclose(Rope(10000.0).frequencies(8), [1, 0.1, 0.01, 0.001], rtol=1e-15)
    np.testing.assert_allclose(Rope(100.0, 0.5).frequencies(8), [1, 0.1], rtol=1e-15)
    np.testing.assert_allclose(Rope(100.0, scaling=Linear(4.0)).frequencies(4), [0.25, 0.025],
                               rtol=1e-15)


def test_llama3_by_hand():
    """Context 2 pi: a frequency is its number of turns. 4 and more are kept, 1 and less divided."""
    scaling = Llama3(8.0, 1.0, 4.0, original_max_position_embeddings=1)
    turns = np.array([9.0, 4.0, 2.5, 1.0, 0.5])
    np.testing.assert_allclose(
        scaling.stretch(turns * 2 * math.pi, 0.0) / (2 * math.pi),
        [9.0, 4.0, 2.5 * (0.5 + 0.5 / 8), 1 / 8, 0.5 / 8], rtol=1e-12)


def test_yarn_by_hand():
    """Six pairs of theta e^6: pair i turns e^-i times a radian, so that the ends are logs.

    With a context of 2 pi e^3, pair 1 turns e^2 times and pair 3 once: 0 and 1 are kept, 3 and
    after divided, 2 is half way.
    """
    frequencies = np.exp(-np.arange(6.0))
    scaling = Yarn(4.0, 2 * math.pi * math.exp(3), beta_fast=math.exp(2), beta_slow=1.0,
                   truncate=False)
    shares = scaling.stretch(frequencies, math.exp(6)) / frequencies
    np.testing.assert_allclose(shares, [1, 1, 0.5 + 0.5 / 4, 0.25, 0.25, 0.25], rtol=1e-9)


@pytest.mark.parametrize("scaling, magnitude", [
    (YARN, 0.1 * math.log(4) + 1), (dataclasses.replace(YARN, factor=0.5), 1.0),
    (dataclasses.replace(YARN, attention_factor=0.7, mscale=2.0, mscale_all_dim=1.0), 0.7),
    (MINISTRAL, 1.0),
    (dataclasses.replace(YARN, mscale=2.0, mscale_all_dim=1.0),
     (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
    (dataclasses.replace(YARN, mscale=2.0), 0.1 * math.log(4) + 1),
    (LLAMA3, 1.0), (Linear(3.0), 1.0)], ids=str)
def test_magnitude(scaling, magnitude):
    assert Rope(scaling=scaling).magnitude == pytest.approx(magnitude, rel=1e-15)


@pytest.mark.parametrize("name", [name for name, (rope, _) in ROPES.items() if rope.scaling])
def test_equals_transformers(name):
    """Frequencies as the library computes them in float32."""
    pytest.importorskip("torch")
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, head_dim = ROPES[name]
    kind = type(rope.scaling).__name__.lower()
    fields = {key: value for key, value in dataclasses.asdict(rope.scaling).items()
              if value is not None}
    config = transformers.LlamaConfig(
        head_dim=head_dim, max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": rope.theta} | fields)
    theirs, magnitude = ROPE_INIT_FUNCTIONS[kind](config)
    np.testing.assert_allclose(rope.frequencies(head_dim), theirs.numpy(), rtol=3e-6)
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.parametrize("name", ROPES)
def test_rotation_by_complex_numbers(name):
    """A pair (i, i + n / 2) is a complex number that is turned and stretched; the rest stays."""
    rope, head_dim = ROPES[name]
    random = np.random.RandomState(0)
    x = random.standard_normal((5, 2, head_dim)).astype(np.float32)
    positions = np.array([0, 1, 7, 100, 1000], np.int32)
    rotated = rope.rotated_dims(head_dim)
    half = rotated // 2
    pairs = x[..., :half] + 1j * x[..., half:rotated].astype(np.float64)
    turned = pairs * rope.magnitude * np.exp(
        1j * positions[:, None, None] * rope.frequencies(head_dim))
    expected = np.concatenate([turned.real, turned.imag, x[..., rotated:]], axis=-1)
    np.testing.assert_allclose(rotate(jnp.asarray(x), jnp.asarray(positions), rope), expected,
                               atol=3e-4)


def test_frequencies_are_rounded_once():
    """At position 2**14 an angle is right to the rounding of its frequency and of itself."""
    rope, head_dim = ROPES["ministral"]
    x = jnp.zeros((1, 1, head_dim)).at[..., :head_dim // 2].set(1.0)
    cos = rotate(x, jnp.array([2 ** 14]), rope)[0, 0, :head_dim // 2]
    rounded = rope.frequencies(head_dim).astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(2.0 ** 14 * rounded), atol=1e-6)


def test_query_scale_by_hand():
    """Nothing within the first period, then 1 + beta log(1 + periods)."""
    positions = jnp.array([0, 15, 16, 31, 32, 160])
    scaled = scale_queries(jnp.ones((6, 1, 2)), positions, QueryScale(beta=0.1, period=16))
    expected = [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3),
                1 + 0.1 * math.log(11)]
    np.testing.assert_allclose(scaled[:, 0, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(scaled[:, 0, 1], expected, rtol=1e-6)
