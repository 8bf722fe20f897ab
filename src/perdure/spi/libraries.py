"""For extensions that list, install or judge builds of llama.cpp."""

from perdure import libraries
from perdure.engine.llama.native.backends import variants
from perdure.engine.llama.native.choice import ChosenLibrary, choose, find_library
from perdure.engine.llama.native.declarations import LlamaBatch
from perdure.engine.llama.native.library import Library, loaded, open_files
from perdure.engine.llama.native.nvidia import HIDING, compat_drivers, runtime_folders
from perdure.engine.llama.native.probe_results import Attempt, ProbeResult, gpu_backends, remember, remembered
from perdure.engine.llama.native.source import LibrarySource, candidates, installed_source, library_folder
from perdure.errors import EngineLibraryError
from perdure.libraries.local_libraries import MANIFEST, Installed, damaged, find, installed, read_entry

__all__ = [
    "HIDING",
    "MANIFEST",
    "Attempt",
    "ChosenLibrary",
    "EngineLibraryError",
    "Installed",
    "Library",
    "LibrarySource",
    "LlamaBatch",
    "ProbeResult",
    "candidates",
    "choose",
    "compat_drivers",
    "damaged",
    "find",
    "find_library",
    "gpu_backends",
    "installed",
    "installed_source",
    "libraries",
    "library_folder",
    "loaded",
    "open_files",
    "read_entry",
    "remember",
    "remembered",
    "runtime_folders",
    "variants",
]
