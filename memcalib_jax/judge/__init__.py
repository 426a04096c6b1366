"""Use levels of memory atoms in responses."""

from memcalib_jax.judge.judge import Judge
from memcalib_jax.judge.lexical import lexical_levels
from memcalib_jax.judge.prompt import DEFAULT_INSTRUCTIONS, judge_messages, load_instructions
from memcalib_jax.judge.schema import AtomJudgment, Judgment, parse_judgment

__all__ = [
    "AtomJudgment",
    "DEFAULT_INSTRUCTIONS",
    "Judge",
    "Judgment",
    "judge_messages",
    "lexical_levels",
    "load_instructions",
    "parse_judgment",
]
