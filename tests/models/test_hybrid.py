"""Models of delta net and attention layers: trees equal dense rows, steps equal the forward."""

import dataclasses
import functools

import hybrid_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax.models import layers, logits
from memcalib_jax.models.attention import Segments
from memcalib_jax.models.delta_net import CHUNK
from memcalib_jax.models.packed import Packed, hidden_states, plain_rows
from memcalib_jax.models.stack import scan_layers

CONFIG = hybrid_models.CONFIG
PARAMS = hybrid_models.random_params(CONFIG, seed=1)
VARIANT_REST = 2  # fewer tokens than the convolution looks back
SPINE, RESPONSES = CHUNK + 10, (5, CHUNK + 3)


def relative_error(ours, theirs):
    return float(np.max(np.abs(np.asarray(ours) - theirs)) / np.max(np.abs(theirs)))


def random_tokens(*shape, seed=0):
    return np.random.RandomState(seed).randint(0, CONFIG.vocab_size, shape).astype(np.int32)


def segments(query_size, *members):
    """Returns one bin's segments; a member is (start, length, [(ancestor start, seen), ...])."""
    depth = max(1, *(len(ancestors) for _, _, ancestors in members))
    ancestors = np.zeros((1, len(members), depth, 2), np.int32)
    for i, (_, _, seen) in enumerate(members):
        ancestors[0, i, :len(seen)] = np.reshape(seen, (-1, 2))
    start, length = np.array([[member[:2] for member in members]], np.int32).transpose(2, 0, 1)
    return Segments(start, length, ancestors[..., 0], ancestors[..., 1], query_size)


def tree_and_rows(seed=1):
    """A prompt, a variant that leaves it after one chunk, and two responses under each.

    Returns the tree in one bin, its four rows right-padded with their lengths, the place in the
    bin of each row's tokens, and the lengths of their prompts.
    """
    spine, rest = random_tokens(SPINE, seed=seed), random_tokens(VARIANT_REST, seed=seed + 1)
    places, at = {"spine": np.arange(SPINE)}, SPINE
    answers = [random_tokens(n, seed=seed + 2 + i) for i, n in enumerate(RESPONSES)]
    parts = [spine]
    for name, tokens in (("rest", rest), ("0", answers[0]), ("1", answers[1]),
                         ("rest 0", answers[0]), ("rest 1", answers[1])):
        places[name], at = at + np.arange(len(tokens)), at + len(tokens)
        parts.append(tokens)
    tokens = np.concatenate([*parts, np.zeros(3, np.int32)])
    to_spine, to_rest = [(0, SPINE)], [(0, CHUNK), (places["rest"][0], VARIANT_REST)]
    groups = (
        segments(96, (0, SPINE, [])),
        segments(16, (places["rest"][0], VARIANT_REST, [(0, CHUNK)]), (0, 0, [])),
        segments(80, *((places[name][0], len(places[name]), seen) for name, seen in (
            ("rest 1", to_rest), ("0", to_spine), ("rest 0", to_rest), ("1", to_spine)))))
    positions = np.zeros(len(tokens), np.int32)
    rows = []
    for prompt in ("", "rest "):
        before = places["spine"] if not prompt else np.concatenate(
            [places["spine"][:CHUNK], places["rest"]])
        for i in "01":
            rows.append((np.concatenate([before, places[prompt + i]]), len(before)))
            positions[rows[-1][0]] = np.arange(len(rows[-1][0]))
    lengths = np.array([len(row) for row, _ in rows])
    where = np.stack([np.pad(row, (0, lengths.max() - len(row))) for row, _ in rows])
    packed = Packed(tokens[None], positions[None], groups)
    return packed, tokens[where], lengths, where, np.array([prompt for _, prompt in rows])


def summed_log_prob(params, hidden, tokens, lengths, prompts):
    scores = jax.nn.log_softmax(
        layers.contract("...d,vd->...v", hidden[:, :-1], layers.head_matrix(params)))
    chosen = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    place = jnp.arange(1, tokens.shape[1])
    return jnp.sum(jnp.where((place >= prompts[:, None]) & (place < lengths[:, None]), chosen, 0))


@functools.partial(jax.jit, static_argnames="remat")
def run(params, packed, bins, places, tokens, lengths, prompts, remat="none"):
    """Returns rows' hidden states and the gradient of their responses' log-prob."""
    def loss(params):
        hidden = hidden_states(params, CONFIG, packed, remat=remat)[bins[:, None], places]
        return summed_log_prob(params, hidden, tokens, lengths, prompts), hidden

    gradients, hidden = jax.grad(loss, has_aux=True)(params)
    return hidden, gradients


@pytest.fixture(scope="module")
def tree():
    packed, tokens, lengths, places, prompts = tree_and_rows()
    hidden, gradients = run(PARAMS, packed, np.zeros(4, np.int32), places, tokens, lengths,
                            prompts, remat="layers")
    return packed, tokens, lengths, places, prompts, hidden, gradients


def test_tree_equals_dense_rows(tree):
    _, tokens, lengths, _, prompts, hidden, gradients = tree
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    dense, expected = run(PARAMS, plain_rows(jnp.asarray(tokens), jnp.asarray(lengths)),
                          np.arange(4), places, tokens, lengths, prompts)
    valid = places < lengths[:, None]
    assert relative_error(hidden[valid], dense[valid]) < 1e-5
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(gradients),
                                    jax.tree.leaves(expected), strict=True):
        assert relative_error(ours, theirs) < 1e-5, jax.tree_util.keystr(path)


@functools.partial(jax.jit, static_argnames="config")
def forward(params, config, packed):
    return hidden_states(params, config, packed)


def test_bins_do_not_see_each_other(tree):
    packed, _, lengths, places, *_, hidden, _ = tree
    other = packed.replace(tokens=random_tokens(*packed.tokens.shape, seed=9))
    both = jax.tree.map(lambda *x: np.concatenate(x), other, packed)
    valid = np.arange(places.shape[1]) < lengths[:, None]
    assert relative_error(forward(PARAMS, CONFIG, both)[1][places][valid], hidden[valid]) < 1e-5


def test_siblings_and_unseen_tokens_leave_no_trace(tree):
    """The variant's rows know nothing of the spine behind the fork, nor responses of others."""
    packed, _, lengths, places, prompts, *_ = tree
    tokens = packed.tokens.copy()
    changed = np.concatenate([np.arange(CHUNK, SPINE), places[3][prompts[3]:lengths[3]]])
    tokens[0, changed] = (tokens[0, changed] + 1) % CONFIG.vocab_size
    before, after = (forward(PARAMS, CONFIG, packed.replace(tokens=x))[0]
                     for x in (packed.tokens, tokens))
    row = places[2][:lengths[2]]
    np.testing.assert_array_equal(before[row], after[row])
    assert relative_error(after[places[0][lengths[0] - 1]], before[places[0][lengths[0] - 1]]) > .01


@pytest.mark.parametrize("config", [
    CONFIG, dataclasses.replace(CONFIG, experts=hybrid_models.EXPERTS, family="qwen3_5_moe")],
    ids=["dense", "experts"])
def test_empty_bins_are_finite(tree, config):
    """A bin without tokens beside one with: no value is NaN, even on the way."""
    packed = tree[0]
    both = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x)]), packed)
    params = hybrid_models.random_params(config)
    with jax.debug_nans(True):
        assert bool(jnp.all(jnp.isfinite(forward(params, config, both))))


@pytest.mark.parametrize("pad", [0, CHUNK])
def test_padding_and_what_it_holds_do_not_matter(pad):
    tokens, lengths = random_tokens(2, CHUNK + 6, seed=3), np.array([CHUNK + 6, 3])
    whole = logits(PARAMS, CONFIG, tokens, lengths)
    padded = np.concatenate([tokens, random_tokens(2, pad, seed=4)], axis=1)
    padded[1, 3:] = 7
    for row, n in enumerate(lengths):
        assert relative_error(
            logits(PARAMS, CONFIG, padded, lengths)[row, :n], whole[row, :n]) < 1e-5


def test_layers_run_in_order():
    """Two periods of a, a, b: what each adds depends on what came before it."""
    steps = {"a": lambda x, added: (x * 2 + added, x), "b": lambda x, added: (x * 2 + added, -x)}
    scanned = {"a": jnp.array([1, 2, 3, 4]), "b": jnp.array([10, 20])}
    last, outputs = scan_layers(("a", "a", "b"), steps, jnp.array(0), scanned)
    # 0 -1-> 1 -2-> 4 -10-> 18 -3-> 39 -4-> 82 -20-> 184
    assert int(last) == 184
    np.testing.assert_array_equal(outputs["a"], [0, 1, 18, 39])
    np.testing.assert_array_equal(outputs["b"], [-4, -82])
