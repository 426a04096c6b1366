"""Traces of made-up steps: random responses, judgments and log-probs through the real credit."""

import jax
import numpy as np

from memcalib_jax import credit
from memcalib_jax.data import Atom, Block, Record
from memcalib_jax.judge import Judgment
from memcalib_jax.sampling import Sample
from memcalib_jax.training.advantages import Counterfactuals, Credit, judged_levels, uniform_credit
from memcalib_jax.training.rollouts import Prompt, Rollouts
from memcalib_jax.training.trace import make_trace

P, G, T, A, C = 3, 5, 24, 4, 9
STOP = 99


class Tokenizer:
    """Token i reads " w<i>", the stop token nothing."""

    def decode(self, ids, **_):
        return "".join("" if i == STOP else f" w{i}" for i in ids)


def rollouts_of(random):
    records = [Record(f"r{p}", "general", f"question {p}?", (Block("b", "t", "t", ("a",)),),
                      tuple(Atom(f"a{a}", "b", f"atom {a}", int(ideal), "apply", {})
                            for a, ideal in enumerate(random.integers(0, 3, A))))
               for p in range(P)]
    samples, judgments = [], []
    for p in range(P):
        lengths = [1, T, *random.integers(5, T, G - 2)]
        samples.append([Sample([*random.integers(0, 50, n - 1), STOP], [0.0] * n, "stop")
                        for n in lengths])
        judgments.append([Judgment(tuple(map(int, random.integers(0, 3, A))), True)
                          for _ in lengths])
    judgments[1][2] = Judgment.invalid("timeout: 300 s")
    prompts = [Prompt(p, record, (1, 2)) for p, record in enumerate(records)]
    return Rollouts(prompts, samples, [], []), judgments


def traced(mode="ordered", granularity="token", stops=False, merge=False, method="memcalib",
           seed=0, step=4):
    """Returns a trace of `P` prompts with `G` responses each; response r1/2 has no judgment."""
    random = np.random.default_rng(seed)
    rollouts, judgments = rollouts_of(random)
    levels = judged_levels(rollouts.records, judgments)
    lengths = np.array([[len(s.tokens) for s in row] for row in rollouts.samples])
    mask = np.arange(T) < lengths[..., None]
    config = credit.CreditConfig.create(
        mode=mode, granularity=granularity, merge_overuse=merge, eta=np.linspace(0.3, 1, C),
        channel_weights=np.linspace(0.5, 2, C), cap=3.0, coverage_power=0.5)
    if method != "memcalib":
        config = credit.CreditConfig()
        assigned = uniform_credit(method, levels, mask, config)
        return make_trace(step, method, Tokenizer(), rollouts, judgments, levels, assigned, None,
                          np.full(C, 0.02), config, 1.5)
    rewards = np.asarray(credit.channel_rewards(
        levels.ideal_P_G_A, levels.actual_P_G_A, levels.atom_mask_P_G_A))
    scored = ((rewards != 0) & levels.valid_P_G[..., None]
              & (np.asarray(credit.localization_signs(mode)) != 0))
    scored[0, 1] = False  # as where a shut gate was not drawn
    full = np.where(mask, -random.exponential(1, mask.shape), np.nan).astype(np.float32)
    change = (random.exponential(1, (P, G, C, T)) * random.choice([-1, 0.01, 1], (P, G, C, T)))
    ablated = np.where(scored[..., None], full[:, :, None] + 2 * change, np.nan)
    ablated = ablated.astype(np.float32)
    sentences = np.minimum(np.arange(T) // 5, 3) * np.ones((P, G, 1), int)
    others = {"sentence_ids_P_G_T": sentences if granularity == "sentence" else None,
              "sentence_thresholds_C": np.full(C, 0.013, np.float32)
              if granularity == "sentence" else None,
              "stop_mask_P_G_T": np.arange(T) == lengths[..., None] - 1 if stops else None}
    thresholds = np.linspace(0.02, 0.3, C).astype(np.float32)
    advantages, diagnostics = jax.device_get(credit.memcalib_advantages(
        rewards, levels.valid_P_G, full, ablated, scored, mask, thresholds, config, **others))
    scores = Counterfactuals(full, ablated, scored, 1e-3, [], [], None)
    return make_trace(step, method, Tokenizer(), rollouts, judgments, levels,
                      Credit(rewards, advantages, diagnostics=diagnostics), scores, thresholds,
                      config, 1.5, **others)
