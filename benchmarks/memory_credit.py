r"""Whom LoGo-GRPO and GRPO blame for failures whose cause is known, and what each learns.

    python -m benchmarks.memory_credit

In the memory game (memcalib_jax/synthetic/memory_game.py). Prints two Markdown tables and, as its
last line, all numbers as JSON.
"""

import json

import numpy as np

from memcalib_jax.synthetic.memory_study import StudyConfig, compare_signs, train

STEPS, SEEDS = 100, range(3)


def main():
    signs = {}
    print(f"Right signs over {STEPS} steps of an untrained policy, in rerolled sessions\n\n"
          "| advantages | failures | of rows | of sessions |\n|---|---|---|---|")
    for failures, of_others in (("all", False), ("of what others told", True)):
        for name, counts in compare_signs(STEPS, StudyConfig(), 0, of_others=of_others).items():
            signs[f"{name}, {failures}"] = [counts.row_rate, counts.session_rate]
            print(f"| {name} | {failures} | {counts.row_rate:.1%} of {counts.rows} "
                  f"| {counts.session_rate:.1%} of {counts.sessions} |")
    learned = {}
    print("\n| trained by | seed | right at the start | mean over steps | at the end |\n"
          "|---|---|---|---|---|")
    for seed in SEEDS:
        for name, fraction in (("grpo", 0.0), ("logo", 0.5)):
            curve = train(StudyConfig(local_fraction=fraction), seed)
            learned[f"{name}, seed {seed}"] = curve
            print(f"| {name} | {seed} | {curve[0]:.1%} | {np.mean(curve):.1%} | {curve[-1]:.1%} |",
                  flush=True)
    print(json.dumps({"signs": signs, "learned": learned}))


if __name__ == "__main__":
    main()
