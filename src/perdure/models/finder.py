"""Finder: models by name, as an extension finds, fetches and lists them, and what holds without one.

Any thread may call it. Only `fetch` goes to the network.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.errors import FetchError, ModelNotFoundError
from perdure.extension import optional_part
from perdure.models.registry import ALIASES, MODELS, FileSource, Progress, Source

if TYPE_CHECKING:
    from perdure.models.placement import FitLevel

_NEEDED = "perdure's extension 'fetching', which is not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """One line of the list: a model that is here, or that can be fetched by its name."""

    name: str
    aliases: tuple[str, ...]
    source: str
    path: Path | None
    size: int | None
    """Bytes on disk, or to fetch; None where only the hub knows."""

    @property
    def present(self) -> bool:
        return self.path is not None


class ModelFinder:
    """A subclass knows hubs, addresses, the catalogue and other programs. Without it there are files."""

    def find(self, name: str, *, own: bool) -> Source:
        """Where the model of a name comes from that is neither of the registry nor an absolute path."""
        path = Path(name).expanduser()
        if path.is_file() or name.endswith(".gguf") or name.startswith((".", "~")):
            return FileSource(path=path)
        raise ModelNotFoundError(f"there is no file {name!r}, and names of models need {_NEEDED}")

    def names_model(self, word: str) -> bool:
        """Whether a word can only be meant as a model: a known name, a file, or an address."""
        lower = word.lower()
        return not any(map(str.isspace, word)) and (lower in {*MODELS, *ALIASES} or lower.endswith(".gguf"))

    def place(self, source: Source, models: Path) -> Path | None:
        """Where a model of a hub or an address is in the folder `models`; None where it is not."""
        return None

    def fetch(self, source: Source, models: Path, progress: Progress | None, *, folders: bool) -> Path:
        """Have a model in the folder `models`; with `folders` that may be a folder of safetensors."""
        raise FetchError(f"to fetch {source} needs {_NEEDED}")

    def entries(self) -> list[LocalModel]:
        """The models of this machine."""
        return []

    def files_of(self, name: str) -> tuple[Path, ...]:
        """The files that `remove` would delete. Only what was fetched: never a file of the user's own."""
        raise ModelNotFoundError(f"to remove {name} needs {_NEEDED}")

    def remove(self, name: str) -> tuple[Path, ...]:
        """Delete a model that was fetched; give the files that are gone."""
        return self.files_of(name)

    def name_of(self, path: Path) -> str | None:
        """What another program calls the model in a file of its own."""
        return None

    # The catalogue.

    def listed(self, name: str) -> Any | None:
        """The model of the catalogue with that short name or alias."""
        return None

    def short_names(self, file: str | Path) -> tuple[str, ...]:
        """The short names of the model in a file of that name."""
        return ()

    def is_short_name(self, word: str) -> bool:
        """Whether a word is a short name, known or of a known family."""
        return False

    def near(self, word: str) -> Sequence[str]:
        """The names that are like one that is not known."""
        return ()

    def all_names(self) -> set[str]:
        """All short names, and those of the models of this machine."""
        return {*MODELS, *ALIASES}

    def ranked(self) -> list[tuple[Any, FitLevel]]:
        """All models of the catalogue with how they fit here, the best first."""
        return []

    def recommended(self, *, most: int | None = None) -> Any | None:
        """The best one that fits and is quick enough to talk to, of at most so many bytes to fetch."""
        return None


@functools.cache
def finder() -> ModelFinder:
    made = optional_part("models by name")
    return ModelFinder() if made is None else made()
