"""The README's example runs as written."""

import pathlib
import re

import numpy as np

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_example_of_the_advantage_functions_runs():
    code, = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    exec(code, names)  # noqa: S102
    advantages = np.asarray(names["advantages_P_G_T"], np.float64)
    assert advantages.shape == (2, 4, 10)
    # Every response keeps its GDPO advantage as its mean, and those have an RMS of 1.
    np.testing.assert_allclose(np.sqrt(np.mean(advantages.mean(-1) ** 2)), 1.0, atol=1e-5)
    assert np.asarray(names["diagnostics"].localized).any()
