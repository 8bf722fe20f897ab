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
    probes = here.home / "probes.json"
    if probes.is_file():
        shutil.copy(probes, folder)
    return folder
