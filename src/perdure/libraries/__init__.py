"""llama.cpp's shared libraries that are installed on this machine. An extension fetches and installs them.

local_libraries  the libraries under PERDURE_HOME: list, check
"""

from perdure.libraries.local_libraries import Installed, damaged, find, installed

__all__ = ["Installed", "damaged", "find", "installed"]
