"""Models and data files that are named by their place on the Hugging Face hub.

They go through the cache of huggingface_hub, which obeys HF_HOME, HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE.
"""

import re
from collections.abc import Callable
from pathlib import Path

# What a model needs, in the folder's root: a repository may hold the weights in other forms too.
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_OTHER_FORMS = ("*/*", "consolidated*.safetensors")

_PART = r"[A-Za-z0-9][\w.-]*"
_REPOSITORY = rf"(?P<repo_id>{_PART}/{_PART})(?:@(?P<revision>[\w.-]+))?"
_MODEL = re.compile(_REPOSITORY)
_DATA_FILE = re.compile(rf"hf://datasets/{_REPOSITORY}/(?P<filename>.+)")


class HubError(ValueError):
    """Something that could not be had from the hub; the message says what to do."""


def is_model_name(name: str) -> bool:
    """Says whether `name` reads like OWNER/NAME or OWNER/NAME@REVISION."""
    return _MODEL.fullmatch(name) is not None and not name.endswith(".gguf")


def is_url(name: str) -> bool:
    """Says whether `name` is meant for `data_file`."""
    return name.startswith("hf://")


def model_folder(name: str) -> Path:
    """Returns a local folder with the model OWNER/NAME[@REVISION], downloaded where it must be.

    Raises:
      HubError: there is no such model, or the hub is out of reach and the cache lacks it.
    """
    from huggingface_hub import snapshot_download

    parts = _MODEL.fullmatch(name).groupdict()
    return _fetch(name, parts, "", lambda: snapshot_download(
        parts["repo_id"], revision=parts["revision"],
        allow_patterns=list(_MODEL_FILES), ignore_patterns=list(_OTHER_FORMS)))


def data_file(url: str) -> Path:
    """Returns the local path of hf://datasets/OWNER/NAME[@REVISION]/FILE, downloaded if need be.

    Raises:
      HubError: the URL is malformed, there is no such file, or the hub is out of reach and the
        cache lacks it.
    """
    from huggingface_hub import hf_hub_download

    match = _DATA_FILE.fullmatch(url)
    if match is None:
        raise HubError(f"{url}: give hf://datasets/OWNER/NAME/FILE")
    parts = match.groupdict()
    options = f" {parts['filename']} --repo-type dataset"
    return _fetch(url, parts, options, lambda: hf_hub_download(
        parts["repo_id"], parts["filename"], repo_type="dataset", revision=parts["revision"]))


def _fetch(name: str, parts: dict, options: str, download: Callable[[], str]) -> Path:
    """Runs a download, and turns its failures into advice."""
    from huggingface_hub import errors

    if parts["revision"]:
        options += f" --revision {parts['revision']}"
    command = f"`hf download {parts['repo_id']}{options} --local-dir DIR`"
    try:
        return Path(download())
    except errors.LocalEntryNotFoundError:
        problem = ("there is no such file or folder here, nor in the Hugging Face cache, and the "
                   "hub is out of reach (no network, or HF_HUB_OFFLINE is set); with a network, "
                   f"run {command} and give the path in DIR")
    except errors.GatedRepoError:
        problem = ("its owner asks for consent first: give it on the hub's page, then set "
                   "HF_TOKEN or run `hf auth login`")
    except errors.RevisionNotFoundError:
        problem = f"the hub knows no revision {parts['revision']} of it"
    except errors.RepositoryNotFoundError:
        problem = ("there is no such file or folder here, and nothing of that name on the hub; "
                   "if it is private, set HF_TOKEN or run `hf auth login`")
    except errors.EntryNotFoundError:
        problem = f"{parts['repo_id']} is on the hub, but holds no such file"
    except errors.HFValidationError as error:
        problem = f"there is no such file or folder here, and the hub allows no such name ({error})"
    except (errors.HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        problem = f"the download failed ({reason[0]}); try again, or run {command}"
    raise HubError(f"{name}: {problem}")
