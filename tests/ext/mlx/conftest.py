"""MLX folders; where mlx has no wheel, everything here is skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from zoo import folders

collect_ignore_glob = [] if folders.HERE else ["test_*.py"]


@pytest.fixture
def llama(zoo_path: Callable[[str], Path]) -> Path:
    """The toy llama's folder; nobody may change it."""
    return zoo_path("mlx-llama")


@pytest.fixture
def own(llama: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(llama, tmp_path / "own"))
