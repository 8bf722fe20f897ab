"""llama.cpp's shared libraries on this machine: which package fits, fetched, verified, installed.

package          the packages that are known, with their digests, and which fits this machine
machine          what this machine has to compute on, and which package fits it
gpu_reader       its GPUs, read in a child process: a broken driver may end it
runtime          NVIDIA's libraries that CUDA backends need and a driver does not bring
client           npm, from the PATH or out of a Python package
archive          a package's archive: verified, then unpacked without trust
local_libraries  the libraries under PERDURE_HOME: install, list, check, remove
"""

from perdure.libraries.local_libraries import (
    Installed,
    damaged,
    find,
    install,
    install_file,
    install_folder,
    installed,
    remove,
)
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
