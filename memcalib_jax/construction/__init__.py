"""The benchmark's construction: question-answer sources in, MemCalib records out, in six stages."""

from importlib import resources


def sample_paths() -> list[str]:
    """Returns the paths of the built-in sources: 24 good rows, and 10 that screening refuses."""
    folder = resources.files(__name__) / "sample"
    return [str(folder / "source_qa.jsonl"), str(folder / "source_bad.jsonl")]
