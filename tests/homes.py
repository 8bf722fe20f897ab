"""Homes of perdure for one test: empty but for the library, which is neither fetched nor probed again."""

from __future__ import annotations

import shutil
from pathlib import Path

from perdure.config import settings


def new_home(folder: Path) -> Path:
    """`folder` as a PERDURE_HOME with the libraries of this machine and what is known of them."""
    folder.mkdir(parents=True, exist_ok=True)
    here = settings()
    if here.engines.is_dir():
        (folder / "engines").symlink_to(here.engines)
    verdicts = here.home / "verdicts.json"
    if verdicts.is_file():
        shutil.copy(verdicts, folder)
    return folder
