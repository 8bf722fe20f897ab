"""Frozen settings. The only module that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where perdure keeps its files, which model it uses when none is named, and which engine library."""

    home: Path
    model: str | None
    llama: Path | None = None
    """A folder with the user's own build of llama.cpp."""
    llama_variant: str | None = None
    """The CPU variant to load, such as `haswell`; else the best one that this CPU runs."""

    @property
    def models(self) -> Path:
        return self.home / "models"

    @property
    def store(self) -> Path:
        """Where the commands keep state between runs."""
        return self.home / "store"

    @property
    def engines(self) -> Path:
        """Where llama.cpp libraries are installed, one folder each."""
        return self.home / "engines"


def settings() -> Settings:
    """The settings of this moment, from the `PERDURE_*` variables of the environment."""
    home = os.environ.get("PERDURE_HOME")
    if home:
        base = Path(home).expanduser()
    else:
        cache = os.environ.get("XDG_DATA_HOME")
        base = (Path(cache).expanduser() if cache else Path.home() / ".local" / "share") / "perdure"
    llama = os.environ.get("PERDURE_LLAMA")
    return Settings(
        home=base,
        model=os.environ.get("PERDURE_MODEL") or None,
        llama=Path(llama).expanduser() if llama else None,
        llama_variant=os.environ.get("PERDURE_LLAMA_VARIANT") or None,
    )
