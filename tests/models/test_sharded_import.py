"""Import into shardings: what is read for a part, and that all parts make the whole."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memcalib_jax.models.weights.families import PARAMETERS


def part(start, stop):
    return slice(start, stop)


ALL = slice(None)


@pytest.mark.parametrize("path, shape, index, expected", [
    # [D, H, d] is stored as [H d, D]: heads 1 and 2 of 4 are its rows 2 to 6.
    ("layers/q", (6, 4, 2), (part(2, 4), part(1, 3), part(0, 2)),
     ((part(2, 6), part(2, 4)), (2, 2, 2), (ALL, ALL, part(0, 2)))),
    # Half a head is cut out of the whole one.
    ("layers/q", (6, 4, 2), (part(0, 6), part(0, 4), part(1, 2)),
     ((part(0, 8), part(0, 6)), (6, 4, 2), (ALL, ALL, part(1, 2)))),
    # [H, d, D] is stored as [D, H d].
    ("layers/o", (4, 2, 6), (part(3, 4), part(0, 1), part(0, 3)),
     ((part(0, 3), part(6, 8)), (1, 2, 3), (ALL, part(0, 1), ALL))),
    # [H, d] is stored as [H d].
    ("layers/k_bias", (4, 2), (part(1, 2), part(0, 2)),
     ((part(2, 4),), (1, 2), (ALL, part(0, 2)))),
    # [F, D] is stored as [D, F].
    ("layers/down", (5, 6), (part(1, 2), part(3, 6)),
     ((part(3, 6), part(1, 2)), (1, 3), (ALL, ALL))),
    # A vector [D] that gives one number is stored as [1, D].
    ("layers/shared_router", (6,), (part(2, 3),), ((part(0, 1), part(2, 3)), (1,), (ALL,))),
    # Stored as it is.
    ("embed", (9, 6), (part(2, 3), part(0, 2)), ((part(2, 3), part(0, 2)), (1, 2), ...)),
])
def test_what_is_read_for_a_part(path, shape, index, expected):
    placement = PARAMETERS[path]
    stored, sizes, wanted = placement.covering(shape, index)
    assert (stored, sizes, wanted) == expected
    values = np.arange(np.prod(shape)).reshape(shape)
    tensor = placement.to_stored(values)
    np.testing.assert_array_equal(
        placement.to_parameter(tensor[stored], sizes)[wanted], values[index])


def test_every_layout_on_eight_devices_equals_the_whole(tmp_path):
    """The device count must be fixed before jax starts, so this runs in a process of its own."""
    program = Path(__file__).with_name("sharded_import.py")
    process = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(program.parents[2])})
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.strip() == "every layout equals the whole"
