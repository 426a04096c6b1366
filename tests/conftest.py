"""What all tests share: the platform, compiled programs and the one real model."""

import gc
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

# Linux allows a process 65,530 memory mappings, and each compiled program takes several.
MOST_MAPPINGS = 16_000


@pytest.fixture(scope="module", autouse=True)
def room_for_programs():
    """Drops the compiled programs of earlier modules before their mappings run out, which crashes."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


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
