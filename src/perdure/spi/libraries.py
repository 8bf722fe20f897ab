"""For extensions that list, install or judge builds of llama.cpp."""

from perdure import libraries as libraries
from perdure.engine.llama.native.backends import variants as variants
from perdure.engine.llama.native.choice import (
    ChosenLibrary as ChosenLibrary,
    choose as choose,
    find_library as find_library,
)
from perdure.engine.llama.native.declarations import LlamaBatch as LlamaBatch
from perdure.engine.llama.native.library import (
    Library as Library,
    loaded as loaded,
    open_files as open_files,
)
from perdure.engine.llama.native.nvidia import (
    HIDING as HIDING,
    compat_drivers as compat_drivers,
    runtime_folders as runtime_folders,
)
from perdure.engine.llama.native.probe_results import (
    Attempt as Attempt,
    ProbeResult as ProbeResult,
    gpu_backends as gpu_backends,
    remember as remember,
    remembered as remembered,
)
from perdure.engine.llama.native.source import (
    LibrarySource as LibrarySource,
    candidates as candidates,
    installed_source as installed_source,
    library_folder as library_folder,
)
from perdure.errors import EngineLibraryError as EngineLibraryError
from perdure.libraries.local_libraries import (
    MANIFEST as MANIFEST,
    Installed as Installed,
    damaged as damaged,
    find as find,
    installed as installed,
    read_entry as read_entry,
)
