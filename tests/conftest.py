"""What all tests share: the platform, compiled programs and the one real model."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time of the programs that tests start is compilation; the key holds the program, the
# flags and the versions.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR",
                      str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
# Nothing a test does may reach a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax  # noqa: E402  after the variables that it reads

# In a process that compiles as much as this one, writing a program out has crashed in jaxlib.
jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32: `(params, config, tokenizer)`."""
    from memcalib_jax import models

    try:
        path = models.default_model_path()
    except models.ModelError as error:
        pytest.skip(str(error))
    params, config = models.load(path)
    return params, config, models.load_tokenizer(path)
