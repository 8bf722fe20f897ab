"""The packages that compute: whether they are here, and their first import.

Nothing of them is imported with this module.
"""

from __future__ import annotations

import importlib
import threading
from importlib.metadata import PackageNotFoundError, version

from perdure import system
from perdure.errors import EngineError

OLDEST = (0, 32, 2)
"""Of mlx-lm: earlier ones run code of a repository (CVE-2026-5843)."""
_importing = threading.Lock()


class MissingPackageError(EngineError):
    """The packages of this engine are not here, or too old."""


def versions() -> dict[str, str]:
    """The versions of what computes, without importing it."""
    found: dict[str, str] = {}
    for name in ("mlx", "mlx-lm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def check_here() -> None:
    """See that mlx-lm is here, and new enough."""
    found = versions()
    advice = "pip install 'perdure[mlx]'"
    if not all(found.values()):
        raise MissingPackageError(
            f"this is an MLX model, and {' and '.join(name for name in found if not found[name])} "
            f"is not installed: {advice} (macOS on Apple silicon, or Linux with glibc 2.35 or newer)"
        )
    if numbers(found["mlx-lm"]) < OLDEST:
        raise MissingPackageError(
            f"mlx-lm {found['mlx-lm']} can run code that comes with a model; "
            f"{'.'.join(map(str, OLDEST))} or newer is needed: {advice}"
        )


def numbers(text: str) -> tuple[int, ...]:
    """A version as numbers, as far as it has some."""
    found: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def load() -> None:
    """Import mlx and mlx-lm. This takes two seconds, the first time."""
    check_here()
    # mlx-lm lowers how many files this process may open, for good. A server needs more than that.
    with _importing, system.kept_limits():
        try:
            importlib.import_module("mlx_lm.utils")
            core = importlib.import_module("mlx.core")
        except ImportError as error:
            raise MissingPackageError(f"mlx-lm cannot be loaded here: {error}") from None
    if core.default_device() == core.cpu:
        # There, what is compiled is written as C++ and given to this machine's compiler, if it has one.
        core.disable_compile()
