"""The packed forward: a tree of segments equals dense rows, however it is laid out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_params

from memcalib_jax.models import ModelConfig, logits
from memcalib_jax.models.attention import Segments
from memcalib_jax.models.layers import contract, head_matrix
from memcalib_jax.models.packed import Packed, hidden_states, plain_rows

CONFIG = ModelConfig(
    family="qwen3", vocab_size=61, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=6,
    num_kv_heads=2, head_dim=8, attention_bias=True, qk_norm=True, tie_embeddings=True)
TOLERANCE = 1e-5
ROW_SIZE = 24


PARAMS = random_params(CONFIG)


@dataclasses.dataclass(frozen=True)
class Node:
    """A segment of a tree made by hand: its tokens and the prefixes of others that it follows."""

    tokens: tuple[int, ...]
    ancestors: tuple[tuple[str, int], ...] = ()


def random_tree(seed, spine=11, branch=6, rest=4, responses=(3, 7, 1), variant_responses=(5, 2)):
    """A prompt with responses, and a variant that leaves it at `branch`, with responses."""
    random = np.random.RandomState(seed)

    def tokens(length):
        return tuple(int(i) for i in random.randint(0, CONFIG.vocab_size, length))

    nodes = {"spine": Node(tokens(spine)),
             "variant": Node(tokens(rest), (("spine", branch),))}
    for i, length in enumerate(responses):
        nodes[f"response {i}"] = Node(tokens(length), (("spine", spine),))
    for i, length in enumerate(variant_responses):
        nodes[f"variant response {i}"] = Node(
            tokens(length), (("spine", branch), ("variant", rest)))
    return nodes


def pack(nodes, *, size=64, order=None, shapes=((16, 24),), num_ancestors=2, num_segments=8,
         fill=0):
    """Lays one tree into one bin: `(Packed, {name: start})`.

    `shapes` are (query_size, context_size) of the groups; a segment goes to the first that fits.
    """
    order = order or list(nodes)
    tokens, positions = np.full(size, fill, np.int32), np.zeros(size, np.int32)
    starts, at = {}, 0
    for name in order:
        node, length = nodes[name], len(nodes[name].tokens)
        seen = sum(n for _, n in node.ancestors)
        tokens[at:at + length] = node.tokens
        positions[at:at + length] = seen + np.arange(length)
        starts[name], at = at, at + length
    groups, left = [], list(order)
    for query_size, context_size in shapes:
        fits = [name for name in left if len(nodes[name].tokens) <= query_size
                and sum(n for _, n in nodes[name].ancestors) <= context_size]
        left = [name for name in left if name not in fits]
        start, length = np.zeros((2, 1, num_segments), np.int32)
        ancestor_start, ancestor_length = np.zeros((2, 1, num_segments, num_ancestors), np.int32)
        for i, name in enumerate(fits):
            start[0, i], length[0, i] = starts[name], len(nodes[name].tokens)
            for j, (ancestor, seen) in enumerate(nodes[name].ancestors):
                ancestor_start[0, i, j], ancestor_length[0, i, j] = starts[ancestor], seen
        groups.append(Segments(start, length, ancestor_start, ancestor_length, query_size))
    assert not left
    return Packed(tokens[None], positions[None], tuple(groups)), starts


def rows(nodes, starts=None):
    """Returns the dense rows of a tree's responses: tokens, lengths, prompt lengths, places.

    `places[b, s]` is the bin index of token s of row b, where `starts` are given.
    """
    names = [name for name in nodes if "response" in name]
    sequences, places, prompts = [], [], []
    for name in names:
        parts = [*nodes[name].ancestors, (name, len(nodes[name].tokens))]
        sequences.append([t for part, n in parts for t in nodes[part].tokens[:n]])
        prompts.append(len(sequences[-1]) - parts[-1][1])
        if starts:
            places.append([starts[part] + i for part, n in parts for i in range(n)])
    lengths = np.array([len(s) for s in sequences])
    pad = [(0, ROW_SIZE - n) for n in lengths]  # one size, so that programs are shared
    tokens = np.stack([np.pad(s, p) for s, p in zip(sequences, pad)]).astype(np.int32)
    places = np.stack([np.pad(s, p) for s, p in zip(places, pad)]) if starts else None
    return tokens, lengths, np.array(prompts), places


def response_log_prob(params, hidden, tokens, lengths, prompts):
    """Sums the log-probs of response tokens, given the hidden states of dense rows."""
    scores = contract("...d,vd->...v", hidden[:, :-1], head_matrix(params))
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), tokens[:, 1:, None], axis=-1)[..., 0]
    place = jnp.arange(1, tokens.shape[1])
    return jnp.sum(jnp.where((place >= prompts[:, None]) & (place < lengths[:, None]), chosen, 0))


@functools.partial(jax.jit, static_argnames="remat")
def tree_pass(params, packed, bins, places, tokens, lengths, prompts, remat="none"):
    """Returns every row's hidden states, the summed log-prob and its gradients."""
    def loss(params):
        hidden = hidden_states(params, CONFIG, packed, remat=remat)[bins[:, None], places]
        return response_log_prob(params, hidden, tokens, lengths, prompts), hidden

    (value, hidden), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return hidden, value, gradients


def run_tree(nodes, remat="none", **layout):
    packed, starts = pack(nodes, **layout)
    tokens, lengths, prompts, places = rows(nodes, starts)
    bins = np.zeros(len(tokens), np.int32)
    return tree_pass(PARAMS, packed, bins, places, tokens, lengths, prompts, remat=remat)


def run_rows(nodes):
    tokens, lengths, prompts, _ = rows(nodes)
    packed = plain_rows(jnp.asarray(tokens), jnp.asarray(lengths))
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return tree_pass(PARAMS, packed, np.arange(len(tokens)), places, tokens, lengths, prompts)


@jax.jit
def forward(packed):
    return hidden_states(PARAMS, CONFIG, packed)[0]


def relative_error(ours, theirs):
    return float(jnp.max(jnp.abs(ours - theirs)) / jnp.max(jnp.abs(theirs)))


def assert_same(nodes, ours, theirs):
    """Compares valid hidden states, the log-prob and every gradient."""
    tokens, lengths, _, _ = rows(nodes)
    valid = np.arange(tokens.shape[1]) < lengths[:, None]
    assert relative_error(ours[0][valid], theirs[0][valid]) < TOLERANCE
    assert relative_error(ours[1], theirs[1]) < TOLERANCE
    for (path, x), (_, y) in zip(jax.tree.leaves_with_path(ours[2]),
                                 jax.tree.leaves_with_path(theirs[2]), strict=True):
        assert relative_error(x, y) < TOLERANCE, jax.tree_util.keystr(path)


@pytest.mark.parametrize("branch", [1, 6, 11])
def test_tree_equals_dense_rows(branch):
    nodes = random_tree(seed=branch, branch=branch)
    assert_same(nodes, run_tree(nodes), run_rows(nodes))


@pytest.mark.parametrize("remat", ["elementwise", "layers"])
def test_remat_changes_nothing(remat):
    nodes = random_tree(seed=2)
    assert_same(nodes, run_tree(nodes, remat=remat), run_tree(nodes))


LAYOUTS = [
    dict(size=33 + 127),  # 127 places of no segment
    dict(size=33),  # none
    dict(fill=60),
    dict(shapes=((11, 11),)),  # exact
    dict(shapes=((64, 40),)),
    dict(shapes=((4, 8), (11, 0), (16, 24))),  # the spine has a shape of its own
    dict(num_ancestors=5),
    dict(num_segments=7),
    dict(num_segments=12),
    dict(order=["variant response 1", "response 2", "variant", "response 0", "spine",
                "variant response 0", "response 1"]),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_does_not_matter(layout):
    nodes = random_tree(seed=3)
    assert sum(len(node.tokens) for node in nodes.values()) == 33
    packed, starts = pack(nodes, **layout)
    tokens, lengths, _, places = rows(nodes, starts)
    valid = np.arange(ROW_SIZE) < lengths[:, None]
    assert relative_error(forward(packed)[places][valid], run_tree(nodes)[0][valid]) < TOLERANCE


def test_layout_does_not_matter_to_gradients():
    nodes = random_tree(seed=3)
    layout = dict(shapes=((11, 0), (16, 24)), size=33 + 127)
    assert_same(nodes, run_tree(nodes, **layout), run_tree(nodes))


def run_two_bins(first, second):
    """Runs two `(nodes, (Packed, starts))` as the bins of one: `tree_pass` and row lengths."""
    both = jax.tree.map(lambda *arrays: np.concatenate(arrays),
                        *(packed for packed, _ in (first[1], second[1])))
    tokens, lengths, prompts, places = (np.concatenate(parts) for parts in zip(
        *(rows(nodes, starts) for nodes, (_, starts) in (first, second))))
    bins = np.repeat([0, 1], len(tokens) // 2)
    return tree_pass(PARAMS, both, bins, places, tokens, lengths, prompts), lengths


def test_two_bins_equal_one_each():
    trees = [random_tree(seed=4), random_tree(seed=5, spine=8, branch=2, rest=7,
                                              responses=(2, 2, 9), variant_responses=(4, 1))]
    (hidden, value, gradients), lengths = run_two_bins(*((nodes, pack(nodes)) for nodes in trees))
    alone = [run_tree(nodes) for nodes in trees]
    valid = np.arange(ROW_SIZE) < lengths[:, None]
    assert relative_error(
        hidden[valid], jnp.concatenate([alone[0][0], alone[1][0]])[valid]) < TOLERANCE
    assert relative_error(value, alone[0][1] + alone[1][1]) < TOLERANCE
    total = jax.tree.map(jnp.add, alone[0][2], alone[1][2])
    for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(total), strict=True):
        assert relative_error(x, y) < TOLERANCE


def test_siblings_do_not_see_each_other():
    nodes = random_tree(seed=6)
    changed = nodes | {"response 1": Node(tuple((t + 1) % 61 for t in nodes["response 1"].tokens),
                                          nodes["response 1"].ancestors)}
    before, after = run_tree(nodes)[0], run_tree(changed)[0]
    assert jnp.all(before[jnp.array([0, 2, 3, 4])] == after[jnp.array([0, 2, 3, 4])])
    assert relative_error(after[1, 11:18], before[1, 11:18]) > 0.01


def test_only_seen_tokens_of_an_ancestor_count():
    """A variant that leaves the spine at token 6 is blind to the spine's token 6 and beyond."""
    nodes = random_tree(seed=7)
    spine = nodes["spine"].tokens
    changed = nodes | {"spine": Node(spine[:6] + tuple((t + 1) % 61 for t in spine[6:]))}
    before, after = run_tree(nodes)[0], run_tree(changed)[0]
    assert jnp.all(before[3:, :15] == after[3:, :15])
    assert relative_error(after[0, 6:14], before[0, 6:14]) > 0.01


@pytest.mark.parametrize("pad", [0, 1, 127])
def test_batch_mates_and_padding_do_not_matter(pad):
    random = np.random.RandomState(8)
    tokens = random.randint(0, 61, (3, 9)).astype(np.int32)
    lengths = np.array([9, 1, 6])
    padded = np.concatenate([tokens, random.randint(0, 61, (3, pad))], axis=1).astype(np.int32)
    together = logits(PARAMS, CONFIG, padded, lengths)
    for row, n in enumerate(lengths):
        alone = logits(PARAMS, CONFIG, tokens[row:row + 1, :n], lengths[row:row + 1])
        assert relative_error(together[row, :n], alone[0]) < TOLERANCE


@pytest.mark.parametrize("pad_id", [0, 3, 7, 60])
def test_mask_comes_from_lengths_not_ids(pad_id):
    """The pad id inside a row is a token like any other, an end-of-sequence id too."""
    tokens = np.array([[5, pad_id, pad_id, 9, pad_id, 2]], np.int32)
    longer = np.concatenate([tokens, [[pad_id, pad_id]]], axis=1).astype(np.int32)
    other = np.concatenate([tokens, [[11, 12]]], axis=1).astype(np.int32)
    lengths = np.array([6])
    exact = logits(PARAMS, CONFIG, tokens, lengths)
    np.testing.assert_array_equal(logits(PARAMS, CONFIG, longer, lengths)[:, :6],
                                  logits(PARAMS, CONFIG, other, lengths)[:, :6])
    assert relative_error(logits(PARAMS, CONFIG, longer, lengths)[:, :6], exact) < TOLERANCE
    swapped = np.where(tokens == pad_id, (pad_id + 1) % 61, tokens).astype(np.int32)
    assert relative_error(logits(PARAMS, CONFIG, swapped, lengths)[0, 3:], exact[0, 3:]) > 1e-3


def test_positions_are_relative():
    """Rotary attention sees differences of positions alone."""
    nodes = random_tree(seed=9)
    packed, starts = pack(nodes)
    shifted = packed.replace(positions=packed.positions + 1000)
    places = rows(nodes, starts)[3]
    assert relative_error(forward(shifted)[places], forward(packed)[places]) < 1e-3


def test_fully_masked_segments_are_finite():
    """A bin without tokens beside one with: no value or gradient is NaN, even on the way."""
    nodes = random_tree(seed=10)
    packed, starts = pack(nodes)
    empty = jax.tree.map(np.zeros_like, packed)
    with jax.debug_nans(True):
        assert jnp.all(jnp.isfinite(forward(packed)))
        assert jnp.all(jnp.isfinite(forward(empty)))
        (_, value, gradients), _ = run_two_bins(
            (nodes, (packed, starts)), (nodes, (empty, starts)))
    assert jnp.isfinite(value)
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(gradients))


def test_log_prob_aligns_with_the_next_token():
    """Five tokens whose model is known by hand: token t is followed by t + 1, modulo 5.

    Attention and MLP add nothing, so a hidden state is its token's embedding: one-hot over root
    mean square, sqrt(5) at its own place.
    """
    config = ModelConfig(family="llama", vocab_size=5, hidden_size=5, intermediate_size=2,
                         num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, norm_eps=0.0,
                         tie_embeddings=False)
    params = jax.tree.map(jnp.ones_like, random_params(config))
    params["layers"] |= {"o": jnp.zeros((1, 1, 2, 5)), "down": jnp.zeros((1, 2, 5))}
    params |= {"embed": jnp.eye(5), "head": jnp.roll(jnp.eye(5), 1, axis=0)}
    values = logits(params, config, np.array([[3, 4, 0, 1, 2]]), np.array([5]))
    expected = 5 ** 0.5 * np.eye(5)[[4, 0, 1, 2, 3]]
    np.testing.assert_allclose(values[0], expected, atol=1e-6)


def test_tied_gradient_reaches_the_embedding_through_the_head():
    """Tokens that are never fed in still have a gradient: they compete in every softmax."""
    nodes = random_tree(seed=11)
    fed = [token for node in nodes.values() for token in node.tokens]
    absent = np.setdiff1d(np.arange(CONFIG.vocab_size), fed)
    assert len(absent) > 10
    assert jnp.all(jnp.any(run_tree(nodes)[2]["embed"][absent] != 0, axis=-1))
