"""The packages that compute: whether they are here, and their first import.

Nothing of them is imported with this module.
"""

from __future__ import annotations

import importlib
import threading
from importlib.metadata import PackageNotFoundError, version

from perdure import EngineError
from perdure.spi.base import processes

OLDEST = (0, 32, 2)
"""Of mlx-lm: earlier ones run code of a repository (CVE-2026-5843)."""
_importing = threading.Lock()


class MissingPackageError(EngineError):
    """The packages of this engine are not here, or too old."""


def versions() -> dict[str, str]:
    """The versions of what computes, without importing it."""
    installed: dict[str, str] = {}
    for name in ("mlx", "mlx-lm"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = ""
    return installed


def check_here() -> None:
    """See that mlx-lm is here, and new enough."""
    installed = versions()
    advice = "pip install 'perdure[mlx]'"
    if not all(installed.values()):
        raise MissingPackageError(
            f"this is an MLX model, and {' and '.join(name for name in installed if not installed[name])} "
            f"is not installed: {advice} (macOS on Apple silicon, or Linux with glibc 2.35 or newer)"
        )
    if numbers(installed["mlx-lm"]) < OLDEST:
        raise MissingPackageError(
            f"mlx-lm {installed['mlx-lm']} can run code that comes with a model; "
            f"{'.'.join(map(str, OLDEST))} or newer is needed: {advice}"
        )


def numbers(text: str) -> tuple[int, ...]:
    """A version as numbers, as far as it has some."""
    parts: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def load() -> None:
    """Import mlx and mlx-lm. This takes two seconds, the first time."""
    check_here()
    # mlx-lm lowers how many files this process may open, for good. A server needs more than that.
    with _importing, processes.kept_limits():
        try:
            importlib.import_module("mlx_lm.utils")
            core = importlib.import_module("mlx.core")
        except ImportError as error:
            raise MissingPackageError(f"mlx-lm cannot be loaded here: {error}") from None
    if core.default_device() == core.cpu:
        # There, what is compiled is written as C++ and given to this machine's compiler, if it has one.
        core.disable_compile()
