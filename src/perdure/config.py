"""Frozen settings. The only module that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where perdure keeps its files and which model it uses when none is named."""

    home: Path
    model: str | None

    @property
    def models(self) -> Path:
        return self.home / "models"

    @property
    def store(self) -> Path:
        """Where the commands keep state between runs."""
        return self.home / "store"


def settings() -> Settings:
    """The settings of this moment, from `PERDURE_HOME` and `PERDURE_MODEL`."""
    home = os.environ.get("PERDURE_HOME")
    if home:
        base = Path(home).expanduser()
    else:
        cache = os.environ.get("XDG_DATA_HOME")
        base = (Path(cache).expanduser() if cache else Path.home() / ".local" / "share") / "perdure"
    return Settings(home=base, model=os.environ.get("PERDURE_MODEL") or None)
