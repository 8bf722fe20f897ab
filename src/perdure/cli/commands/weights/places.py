"""The file that is meant by a word: a file, or a model's name."""

from __future__ import annotations

from pathlib import Path


def file_of(name: str) -> Path:
    """A safetensors file as it is; else the model of that name, fetched first if it is not here."""
    from perdure import models
    from perdure.cli.output.progress import fetching

    if Path(name).suffix == ".safetensors":
        return Path(name)
    with fetching(name) as report:
        return models.path(name, report)
