"""Compiles perdure's C part again where its source is newer than what was compiled, as after a pull."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_FOLDER = _ROOT / "src/perdure/engine/row_kernels"


def compile_if_stale() -> None:
    """Before anything imports it."""
    source, made = _FOLDER / "row_kernels.c", _FOLDER / "librow_kernels.so"
    if not made.exists() or made.stat().st_mtime < source.stat().st_mtime:
        subprocess.run([sys.executable, str(_ROOT / "tools/build_hook.py")], cwd=_ROOT, check=True)


compile_if_stale()
