"""What does scoring only a share of the shut gates save, and what does it move?

    python -m benchmarks.closed_gates

Groups are drawn from the built-in sample's judged responses: early in training half of them are
calibrated, late nine of ten, so that more groups agree and more gates are shut. For each fraction
of shut gates that is scored it tells the tokens of the counterfactual pass, and after `--steps`
batches how far thresholds and token advantages are from those with all pairs scored. The last line
is one JSON object.
"""

import dataclasses
import json

import jax
import numpy as np
from absl import app, flags

from memcalib_jax.credit import CreditConfig, init_thresholds
from memcalib_jax.data import load_records, sample_path
from memcalib_jax.data.sample import load_responses
from memcalib_jax.judge import Judgment
from memcalib_jax.models import default_model_path, load, load_tokenizer
from memcalib_jax.sampling import Sample
from memcalib_jax.scoring.bins import bin_sizes
from memcalib_jax.scoring.counterfactual import pack_groups
from memcalib_jax.training.advantages import (
    judged_levels, localized_credit, pairs_to_score, response_mask, score_channels)
from memcalib_jax.training.rollouts import Policy, Rollouts, SamplingConfig, render_prompts

FLAGS = flags.FLAGS
flags.DEFINE_integer("prompts", 4, "Prompts of a batch.")
flags.DEFINE_integer("group_size", 8, "Responses of a prompt.")
flags.DEFINE_integer("max_tokens", 48, "Tokens of a response; longer ones are cut.")
flags.DEFINE_integer("steps", 4, "Batches.")
flags.DEFINE_list("fractions", ["0.25", "0"], "Shares of the shut gates that are scored.")

# Shares of calibrated, over-using and under-using responses.
STAGES = {"early": (0.5, 0.2, 0.3), "late": (0.9, 0.04, 0.06)}


def batches(tokenizer, shares, rng):
    """Yields (rollouts, judged levels) of groups drawn from the sample."""
    records = {record.id: record for record in load_records(sample_path("records.jsonl"))}
    answers = {}
    for response in load_responses(sample_path("responses.jsonl")):
        answers.setdefault(response.record_id, []).append(response)
    for _ in range(FLAGS.steps):
        chosen = [records[i] for i in rng.choice(sorted(answers), FLAGS.prompts, replace=False)]
        prompts, _ = render_prompts(tokenizer, chosen, representation="atomic",
                                    max_prompt_tokens=4096)
        samples, judgments = [], []
        for record in chosen:
            drawn = [answers[record.id][v] for v in rng.choice(3, FLAGS.group_size, p=shares)]
            samples.append([Sample(tokenizer.encode(r.text, add_special_tokens=False)
                                   [:FLAGS.max_tokens], [], "length") for r in drawn])
            judgments.append([Judgment(tuple(r.levels[atom.id] for atom in record.atoms), True)
                              for r in drawn])
        yield Rollouts(prompts, samples, [], []), judged_levels(chosen, judgments)


def study(policy, stage: str) -> dict:
    """Returns, for each fraction, tokens and distances from scoring every pair."""
    config, sizes = CreditConfig.create(), bin_sizes(4096)
    sampling = SamplingConfig(FLAGS.group_size, FLAGS.max_tokens)
    fractions = [1.0, *map(float, FLAGS.fractions)]
    thresholds = {fraction: init_thresholds() for fraction in fractions}
    totals = {fraction: {"pairs": 0, "tokens": 0, "moved": [], "size": []}
              for fraction in fractions}
    rng = np.random.default_rng(0)
    for step, (rollouts, levels) in enumerate(batches(policy.tokenizer, STAGES[stage], rng)):
        everything = pairs_to_score(levels, config, 1.0, None)
        scores = score_channels(policy, rollouts, levels, everything, config, sampling, "atomic",
                                sizes)
        mask = response_mask(rollouts, FLAGS.max_tokens)
        exact = None
        for fraction in fractions:
            scored = pairs_to_score(levels, config, fraction, jax.random.key(step))
            kept = [dataclasses.replace(group, pairs=pairs) for group, pairs in zip(
                scores.groups, _kept_pairs(scores, scored))]
            credit = localized_credit(levels, dataclasses.replace(scores, scored_P_G_C=scored),
                                      mask, thresholds[fraction], config)
            thresholds[fraction] = credit.thresholds_C
            exact = credit.advantages_P_G_T if exact is None else exact
            total = totals[fraction]
            total["pairs"] += int(scored.sum())
            total["tokens"] += pack_groups(policy.config, kept, sizes).tree_tokens
            total["moved"].append(credit.advantages_P_G_T - exact)
            total["size"].append(exact[mask])
    size = np.sqrt(np.mean(np.square(np.concatenate(totals[1.0]["size"]))))
    return {str(fraction): {
        "pairs": total["pairs"], "tokens": total["tokens"],
        "largest_threshold_move": float(np.abs(
            thresholds[fraction] - thresholds[1.0]).max()),
        "largest_advantage_move": float(max(np.abs(x).max() for x in total["moved"])),
        "relative_advantage_move": float(np.sqrt(np.mean(np.square(np.concatenate(
            [x.ravel() for x in total["moved"]])))) / size),
    } for fraction, total in totals.items()}


def _kept_pairs(scores, scored):
    """Yields each group's pairs without the counterfactuals that are not scored."""
    for group, full, keep in zip(scores.groups, scores.scored_P_G_C, scored):
        channels = iter([bool(keep[g, c]) for g in range(len(full))
                         for c in np.flatnonzero(full[g])])
        shifted = {i for i, offset in enumerate(group.position_offsets) if offset}
        yield [pair for pair in group.pairs
               if pair[0] == 0 or pair[0] in shifted or next(channels)]


def main(_):
    path = default_model_path()
    params, config = load(path)
    policy = Policy(params, config, load_tokenizer(path))
    result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__,
              "steps": FLAGS.steps} | {stage: study(policy, stage) for stage in STAGES}
    print(f"{'':8}{'scored':>8}{'pairs':>8}{'tokens':>10}{'thresholds move':>18}"
          f"{'advantages move (largest, relative)':>38}")
    for stage in STAGES:
        for fraction, row in result[stage].items():
            print(f"{stage:8}{float(fraction):>8.0%}{row['pairs']:>8}{row['tokens']:>10,}"
                  f"{row['largest_threshold_move']:>18.4f}"
                  f"{row['largest_advantage_move']:>28.4f}{row['relative_advantage_move']:>10.2%}")
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
