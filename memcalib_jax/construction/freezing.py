"""What a pipeline is: a hash of its prompts, its code and its settings."""

import hashlib
import json
from collections.abc import Mapping
from importlib import resources

CODE = ("admission", "annotation", "assurance", "composition", "decisions", "derivation",
        "distractors", "layout", "pipeline", "schemas", "screening", "sources")
"""Files whose content decides what is built."""


def pipeline_parts(prompts: Mapping[str, str], settings: Mapping[str, object]) -> dict[str, str]:
    """Returns the hash of each part of a pipeline: `prompt/...`, `code/...` and `setting/...`.

    Args:
      prompts: instructions by task.
      settings: what else decides the outcome, as JSON values: models, sampling, bounds.
    """
    folder = resources.files(__package__)
    parts = {f"prompt/{name}": text.encode() for name, text in prompts.items()}
    parts |= {f"code/{name}": (folder / f"{name}.py").read_bytes() for name in CODE}
    parts |= {f"setting/{name}": json.dumps(value, sort_keys=True).encode()
              for name, value in settings.items()}
    return {name: hashlib.sha256(data).hexdigest() for name, data in sorted(parts.items())}


def pipeline_hash(parts: Mapping[str, str]) -> str:
    """Hashes the parts to one name of the pipeline, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Names the parts that two pipelines do not share."""
    return sorted(name for name in before.keys() | after.keys()
                  if before.get(name) != after.get(name))
