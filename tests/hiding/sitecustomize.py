"""Hides extensions from this process and its children, as if their folders were deleted.

PYTHONPATH=tests/hiding PERDURE_HIDDEN=mlx,cluster python -m pytest …
PYTHONPATH=tests/hiding PERDURE_HIDDEN=all python -m pytest …
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

HIDDEN = frozenset(filter(None, os.environ.get("PERDURE_HIDDEN", "").split(",")))


class Hiding(MetaPathFinder):
    """Finds nothing, and says so, for what is hidden."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = fullname.split(".")
        if parts[:2] == ["perdure", "ext"] and len(parts) > 2 and HIDDEN & {parts[2], "all"}:
            raise ModuleNotFoundError(f"No module named {fullname!r}: it is hidden", name=fullname)
        return None


if HIDDEN:
    sys.meta_path.insert(0, Hiding())
