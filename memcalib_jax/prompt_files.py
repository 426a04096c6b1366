"""Instructions for language models: a text file each, any of which a user may replace."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path


def load_prompts(package: str, names: Sequence[str],
                 folder: str | Path | None = None) -> dict[str, str]:
    """Reads the files NAME.txt of a package's folder "prompts", or those of `folder` instead.

    Args:
      package: whose prompts are meant.
      names: of all its prompts.
      folder: files of the same names there replace the package's; others must not be there.

    Raises:
      ValueError: the folder has no or an unknown .txt file, or one that is empty or no UTF-8.
    """
    ours = resources.files(package) / "prompts"
    prompts = {name: (ours / f"{name}.txt").read_text(encoding="utf-8") for name in names}
    if folder is None:
        return prompts
    known = ", ".join(f"{name}.txt" for name in names)
    paths = sorted(Path(folder).glob("*.txt"))
    if not paths:
        raise ValueError(f"{folder} holds no prompt; there are {known}")
    for path in paths:
        if path.stem not in prompts:
            raise ValueError(f"{path}: there is no such prompt, only {known}")
        try:
            prompts[path.stem] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        if not prompts[path.stem].strip():
            raise ValueError(f"{path} is empty")
    return prompts
