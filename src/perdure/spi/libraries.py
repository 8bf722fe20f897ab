"""For extensions that list, install or judge builds of llama.cpp."""

from perdure import libraries
from perdure.engine.llama.native import probe
from perdure.engine.llama.native.choice import ChosenLibrary, choose, find_library
from perdure.engine.llama.native.library import loaded
from perdure.engine.llama.native.probe_results import ProbeResult, gpu_backends, remembered
from perdure.engine.llama.native.source import LibrarySource, candidates, library_folder
from perdure.libraries import Installed
from perdure.libraries.machine import LibraryFit, fits, installable, read_machine
from perdure.libraries.runtime import (
    RUNTIMES,
    compat_drivers,
    install_runtime,
    runtime_folders,
    unpack_wheels,
)
from perdure.models.registry import Progress

__all__ = [
    "RUNTIMES",
    "ChosenLibrary",
    "Installed",
    "LibraryFit",
    "LibrarySource",
    "ProbeResult",
    "Progress",
    "candidates",
    "choose",
    "compat_drivers",
    "find_library",
    "fits",
    "gpu_backends",
    "install_runtime",
    "installable",
    "libraries",
    "library_folder",
    "loaded",
    "probe",
    "read_machine",
    "remembered",
    "runtime_folders",
    "unpack_wheels",
]
