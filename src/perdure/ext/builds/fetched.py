"""The prebuilt library that suits this machine, fetched where there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable

from perdure.ext.builds.installation import install
from perdure.ext.builds.machine import ranked, read_machine
from perdure.ext.builds.package import default_backend
from perdure.ext.builds.runtime import install_runtime
from perdure.spi.base import settings
from perdure.spi.libraries import LibrarySource, installed_source
from perdure.spi.models import MUCH, Progress

log = logging.getLogger("perdure.engine")


def fetch_library(
    progress: Progress | None = None, agree: Callable[[str, int], bool] | None = None
) -> LibrarySource:
    """The prebuilt library for this machine, fetched and installed now.

    The best one is taken if it is small, if `engine` is "auto" in the config, or if a user agrees to its
    size; else the usual one. Where there is a GPU, a line of the log says what is taken.
    """
    backend = settings().engine
    if backend not in (None, "auto"):
        return installed_source(install(backend, progress), "fetched")
    machine = read_machine()
    best = next(iter(ranked(machine)), None)
    if best is None or not machine.has_gpu or best.package.backend == default_backend():
        return installed_source(install(progress=progress), "fetched")
    what = f"{best.package} ({best.megabytes}): {best.reason}"
    small = best.nbytes <= MUCH
    if small or backend == "auto" or (agree is not None and agree(f"found {machine}; {what}", best.nbytes)):
        log.warning("found %s; taking %s", machine, what)
        entry = install(best.package.backend, progress)
        if best.runtime is not None:
            install_runtime(best.runtime, progress)
        return installed_source(entry, "fetched")
    log.warning("found %s, which is not used: `perdure engine install` fetches %s", machine, what)
    return installed_source(install(progress=progress), "fetched")
