"""Files that are there whole or not at all."""

import json
import os
import pathlib


def write_atomically(path: pathlib.Path, data: bytes):
    """Writes a file so that it is there whole or not at all; one writer at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # One name: what a killed process left is overwritten by whoever does its work again.
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: pathlib.Path, value):
    """Writes one JSON document, indented, whole or not at all."""
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
