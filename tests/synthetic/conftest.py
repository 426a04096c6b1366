"""A small random start, and two steps of every way to assign credit from it."""

import jax
import pytest

from memcalib_jax.synthetic.arms import Arm, Training, run_arm
from memcalib_jax.synthetic.cold_start import init_params, model_config
from memcalib_jax.synthetic.vocabulary import build_tokenizer
from memcalib_jax.training.rollouts import Policy

TRAINING = Training(num_steps=2, num_prompts=4, group_size=4, mini_batch_size=8,
                    train_records=32, eval_every=1, eval_records=8)


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="session")
def start(tokenizer):
    config = model_config()
    return Policy(init_params(config, jax.random.key(0)), config, tokenizer)


@pytest.fixture(scope="session")
def guarded_run(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    run_arm(folder, Arm.parse("guarded@0.05"), TRAINING, start, 3, lambda line: None)
    return folder
