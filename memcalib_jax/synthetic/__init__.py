"""The slots benchmark: learning to use memories, small enough to be seen in minutes."""

from memcalib_jax.synthetic.arms import Arm, Training, run_arm
from memcalib_jax.synthetic.cold_start import ColdStart, make_cold_start
from memcalib_jax.synthetic.judge import ExactJudge, use_levels
from memcalib_jax.synthetic.records import draw_records
from memcalib_jax.synthetic.vocabulary import build_tokenizer

__all__ = ["Arm", "ColdStart", "ExactJudge", "Training", "build_tokenizer",
           "draw_records", "make_cold_start", "run_arm", "use_levels"]
