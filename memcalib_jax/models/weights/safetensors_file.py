"""Writing a safetensors file piece by piece, so that it is never whole in memory."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclasses.dataclass(frozen=True)
class OutgoingTensor:
    """A tensor to be written.

    Attributes:
      name, dtype, shape: as they will stand in the file.
      pieces: makes its values when they are written: arrays of any shape and dtype whose elements,
        one array after another, are the tensor's.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(path: Path, tensors: Sequence[OutgoingTensor]):
    """Writes a file and waits until it is on the disk."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": _CODES[tensor.dtype.name], "shape": list(tensor.shape),
                               "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the values are aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            written = 0
            for piece in tensor.pieces():
                values = np.ascontiguousarray(piece, tensor.dtype).reshape(-1)
                written += file.write(values.view(np.uint8))
            if written != tensor.nbytes:
                raise ValueError(f"{tensor.name}: {written} bytes instead of {tensor.nbytes}")
        file.flush()
        os.fsync(file.fileno())
