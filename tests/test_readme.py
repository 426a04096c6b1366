"""The README's examples run as written."""

import pathlib
import re

import jax
import numpy as np
from random_models import random_params

from memcalib_jax.models import ModelConfig
from memcalib_jax.models.weights import export

README = pathlib.Path(__file__).parents[1] / "README.md"
CREDIT, MESH = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_example_of_the_advantage_functions_runs():
    names = {}
    exec(CREDIT, names)  # noqa: S102
    advantages = np.asarray(names["advantages_P_G_T"], np.float64)
    assert advantages.shape == (2, 4, 10)
    # Every response keeps its GDPO advantage as its mean, and those have an RMS of 1.
    np.testing.assert_allclose(np.sqrt(np.mean(advantages.mean(-1) ** 2)), 1.0, atol=1e-5)
    assert np.asarray(names["diagnostics"].localized).any()


def test_the_example_of_a_mesh_runs(tmp_path):
    config = ModelConfig("llama", 41, 16, 24, 2, 4, 2, 4)
    params = random_params(config)
    export.save(tmp_path / "model", params, config)
    names = {"path": tmp_path / "model"}
    exec(MESH, names)  # noqa: S102
    for ours, loaded in zip(jax.tree.leaves(params), jax.tree.leaves(names["params"]), strict=True):
        np.testing.assert_array_equal(loaded, ours)
    assert names["params"]["embed"].sharding.mesh.axis_names == ("data", "fsdp", "expert", "tensor")
