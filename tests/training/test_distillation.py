"""OPSD's objectives against float64 oracles: hand formulas and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_params

from memcalib_jax.models import ModelConfig, logits
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.scoring.counterfactual import score_packing
from memcalib_jax.scoring.log_probs import token_log_probs
from memcalib_jax.training.distillation import (
    DistillConfig, _masks, _policy_batches, _taught_batches, _teach)
from memcalib_jax.training.divergence import divergence_sums, forward_kl
from memcalib_jax.training.losses import policy_objective
from memcalib_jax.training.pairs import Pair, pack_pairs
from memcalib_jax.training.rollouts import Policy, SamplingConfig
from memcalib_jax.training.state import OptimizerConfig
from memcalib_jax.training.top_tokens import Buckets, bucket_log_probs
from memcalib_jax.training.update import ObjectiveConfig, gradient_sums

ROWS, VOCABULARY, K = 4, 12, 3
RNG = np.random.default_rng(1)
STUDENT = RNG.normal(size=(ROWS, VOCABULARY)) * 2
TEACHER = RNG.normal(size=(ROWS, VOCABULARY)) * 2
MASK = np.array([True, True, False, True])
IDENTITY = np.eye(VOCABULARY, dtype=np.float32)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def buckets(log_probs, ids):
    """Returns float64 log-probs `[rows, K + 1]`: the ids', and that of all others."""
    p = np.exp(log_probs)
    chosen = np.take_along_axis(p, ids, -1)
    return np.log(np.concatenate([chosen, 1 - chosen.sum(-1, keepdims=True)], -1))


def finite_differences(function, x, step=1e-6):
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        change = np.zeros_like(x)
        change[index] = step
        gradient[index] = (function(x + change) - function(x - change)) / (2 * step)
    return gradient


TOP = np.argsort(-TEACHER, -1)[:, :K].astype(np.int32)
P = buckets(log_softmax(TEACHER), TOP)


def kl_oracle(student):
    q = buckets(log_softmax(student), TOP)
    return (np.exp(P) * (P - q)).sum(-1)[MASK].sum()


def test_forward_kl_and_its_gradient():
    teacher = Buckets(P[:, :K].astype(np.float32), P[:, K].astype(np.float32))
    teacher.chosen[~MASK] = np.nan

    def loss(student):
        parts = forward_kl(teacher, bucket_log_probs(student, IDENTITY, TOP), MASK)
        return parts.loss, parts

    gradient, sums = jax.grad(loss, has_aux=True)(STUDENT.astype(np.float32))
    np.testing.assert_allclose(sums.loss, kl_oracle(STUDENT), rtol=1e-5)
    q = np.exp(log_softmax(STUDENT))
    in_buckets = np.exp(buckets(log_softmax(STUDENT), TOP))
    # q_v less the teacher's mass of v's bucket, shared out within the tail as q shares it.
    target = np.exp(P[:, K:]) * q / in_buckets[:, K:]
    np.put_along_axis(target, TOP, np.exp(P[:, :K]), -1)
    by_hand = np.where(MASK[:, None], q - target, 0.0)
    np.testing.assert_allclose(gradient, by_hand, atol=2e-6)
    np.testing.assert_allclose(finite_differences(kl_oracle, STUDENT), by_hand, atol=1e-8)
    np.testing.assert_allclose(sums.student_tail, in_buckets[MASK, K].sum(), rtol=1e-5)
    np.testing.assert_allclose(sums.teacher_tail, np.exp(P[MASK, K]).sum(), rtol=1e-5)
    assert float(sums.tokens) == 3


def test_a_student_that_agrees_has_no_loss_and_no_gradient():
    agrees = TEACHER.astype(np.float32)
    teacher = bucket_log_probs(agrees, IDENTITY, TOP)

    def loss(student):
        return forward_kl(teacher, bucket_log_probs(student, IDENTITY, TOP), MASK).loss

    value, gradient = jax.value_and_grad(loss)(agrees)
    assert float(value) == 0.0
    np.testing.assert_allclose(gradient, 0.0, atol=1e-7)


def test_a_sure_teacher_leaves_loss_and_gradient_finite():
    sure = np.full((1, VOCABULARY), -200.0, np.float32)
    sure[0, :K] = 100.0, 99.0, 98.0
    ids = np.arange(K, dtype=np.int32)[None]
    teacher = bucket_log_probs(sure, IDENTITY, ids)

    def loss(student):
        return forward_kl(teacher, bucket_log_probs(student, IDENTITY, ids),
                          np.array([True])).loss

    for student in (sure, -sure, np.zeros_like(sure)):
        value, gradient = jax.value_and_grad(loss)(student)
        assert np.isfinite(value) and np.isfinite(gradient).all()
    np.testing.assert_allclose(value, log_softmax(sure[0, :K].astype(float)) @ np.exp(
        log_softmax(sure[0, :K].astype(float))) + np.log(VOCABULARY), rtol=1e-5)


CHOSEN = np.array([1, 5, 0, 11], np.int32)


@pytest.mark.parametrize("shift, clipped", [(0.0, False), (0.4, True)])
def test_policy_gradient(shift, clipped):
    """`shift` moves the student away from the old policy, so that a ratio is clipped."""
    old = log_softmax(STUDENT)[np.arange(ROWS), CHOSEN]
    teacher = log_softmax(TEACHER)[np.arange(ROWS), CHOSEN]
    advantages, rows = teacher - old, np.arange(ROWS)
    now = STUDENT.copy()
    now[rows, CHOSEN] += shift

    def oracle(student):
        ratio = np.exp(log_softmax(student)[rows, CHOSEN] - old)
        held = np.clip(ratio, 0.8, 1.2)
        return -np.minimum(ratio * advantages, held * advantages)[MASK].sum()

    def loss(student):
        log_probs, entropy = token_log_probs(student, IDENTITY, CHOSEN)
        return policy_objective(log_probs, old, old, np.where(MASK, advantages, np.nan), MASK,
                                entropy, clip=0.2, kl_weight=0.0).loss

    value, gradient = jax.value_and_grad(loss)(now.astype(np.float32))
    np.testing.assert_allclose(value, oracle(now), rtol=1e-5)
    q = np.exp(log_softmax(now))
    ratio = q[rows, CHOSEN] / np.exp(old)
    held = ((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    assert held[MASK].any() == clipped and not held[MASK].all()
    one_hot = np.eye(VOCABULARY)[CHOSEN]
    by_hand = -(advantages * ratio * (MASK & ~held))[:, None] * (one_hot - q)
    np.testing.assert_allclose(gradient, by_hand, atol=3e-6)
    np.testing.assert_allclose(finite_differences(oracle, now), by_hand, atol=1e-7)


CONFIG = ModelConfig("llama", 37, 16, 24, 2, 2, 1, 8)
START, OTHER = random_params(CONFIG, scale=0.3), random_params(CONFIG, scale=0.3, seed=1)
SIZES = bin_sizes(64)


def make_pairs():
    """Returns what the student sees, and what its teacher sees; the responses are the same."""
    rng = np.random.default_rng(3)
    shorter, longer = ([tuple(map(int, rng.integers(0, 37, n))) for n in lengths]
                       for lengths in ((7, 9), (15, 11)))
    responses = [tuple(map(int, rng.integers(0, 37, n))) for n in (6, 3, 5)]
    where = (0, 0, 1)
    return ([Pair(shorter[p], r) for p, r in zip(where, responses)],
            [Pair(longer[p], r) for p, r in zip(where, responses)])


PAIRS, TAUGHT = make_pairs()


def settings(method, kl=0.0):
    return DistillConfig(method, SamplingConfig(2, 8), ObjectiveConfig(
        kl_weight=kl, compute_dtype="float32", remat="none"), OptimizerConfig(), 4, 64, K)


def dense(params, pair):
    """Returns float64 log-probs `[length, vocabulary]` at a response's tokens, from whole rows."""
    tokens = np.zeros((1, 24), np.int32)
    whole = pair.prompt + pair.response
    tokens[0, :len(whole)] = whole
    rows = np.asarray(logits(params, CONFIG, tokens, np.array([len(whole)]))[0], np.float64)
    return log_softmax(rows[len(pair.prompt) - 1:len(whole) - 1])


def moved(params, direction, step):
    return jax.tree.map(lambda x, d: x + step * d, params, direction)


def test_a_model_distils_as_dense_rows_say():
    teachers = [dense(START, pair) for pair in TAUGHT]
    tops = [np.argsort(-rows, -1)[:, :K] for rows in teachers]

    def oracle(params):
        total = 0.0
        for teacher, top, pair in zip(teachers, tops, PAIRS):
            p, q = buckets(teacher, top), buckets(dense(params, pair), top)
            total += (np.exp(p) * (p - q)).sum()
        return total

    gkd = settings("opsd_gkd")
    taught = _teach(gkd, START, CONFIG, pack_pairs(CONFIG, TAUGHT, SIZES))
    for ids, top in zip(taught[0][0], tops):
        np.testing.assert_array_equal(ids, top)
    gradients = []
    for sizes, order in ((SIZES, (0, 1, 2)), ((24,), (2, 1, 0))):
        packing = pack_pairs(CONFIG, [PAIRS[i] for i in order], sizes)
        rows = [[[part[0][i] for i in order]] for part in taught]
        batches, _ = _taught_batches(gkd, None, None, packing, rows)
        gradient, sums = gradient_sums(
            OTHER, CONFIG, batches, gkd.objective, measure=divergence_sums)
        np.testing.assert_allclose(sums.loss, oracle(OTHER), rtol=2e-5)
        assert float(sums.tokens) == 14
        gradients.append(gradient)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradients[0]))
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6 * scale)
    direction = random_params(CONFIG, scale=1.0, seed=2)
    along = sum(float(jnp.vdot(g, d)) for g, d in zip(
        *map(jax.tree.leaves, (gradients[0], direction)), strict=True))
    slope = (oracle(moved(OTHER, direction, 1e-3)) - oracle(moved(OTHER, direction, -1e-3))) / 2e-3
    np.testing.assert_allclose(along, slope, rtol=2e-3)


def test_advantages_are_the_teachers_log_probs_less_the_old_ones():
    pg = settings("opsd_pg")
    taught = _teach(pg, START, CONFIG, pack_pairs(CONFIG, TAUGHT, SIZES))
    packing = pack_pairs(CONFIG, PAIRS, SIZES)
    batches, measured = _policy_batches(pg, Policy(OTHER, CONFIG, None), START, packing, taught)
    expected = []
    for rows, old, pair, teacher_pair in zip(
            *[packing.rows([getattr(batch, name) for batch in batches])[0]
              for name in ("advantages", "old_log_probs")], PAIRS, TAUGHT):
        at = np.arange(len(pair.response)), pair.response
        np.testing.assert_allclose(old, dense(OTHER, pair)[at], atol=1e-5)
        expected.append(dense(START, teacher_pair)[at] - dense(OTHER, pair)[at])
        np.testing.assert_allclose(rows, expected[-1], atol=2e-5)
    np.testing.assert_allclose(
        measured["distill/reverse_kl"], -np.concatenate(expected).mean(), rtol=1e-4)
    reference, = packing.rows([batch.reference_log_probs for batch in batches])
    own, = score_packing(START, CONFIG, packing)
    np.testing.assert_array_equal(np.concatenate(reference), np.concatenate(own))
    for batch, mask in zip(batches, _masks(packing)):
        assert not batch.advantages[~mask].any()


def test_a_teacher_who_sees_the_same_has_nothing_to_teach():
    packing = pack_pairs(CONFIG, PAIRS, SIZES)
    for method, measure in (("opsd_pg", {}), ("opsd_gkd", {"measure": divergence_sums})):
        chosen = settings(method, kl=0.5)
        make = {"opsd_pg": _policy_batches, "opsd_gkd": _taught_batches}[method]
        batches, _ = make(chosen, Policy(START, CONFIG, None), START, packing,
                          _teach(chosen, START, CONFIG, packing))
        gradient, sums = gradient_sums(START, CONFIG, batches, chosen.objective, **measure)
        assert abs(float(sums.loss)) < 1e-5
        assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient)) < 1e-4
