"""llama.cpp's shared library: found, tried in a child process, checked, loaded, declared.

source        which library is used, and where it is
probe         whether a library runs here, found out in a child process
guard         a loaded library's version, functions and structs, checked
library       the loaded library
declarations  its functions and structs
layout        how its state bytes are laid out
backends, devices  what it can compute on
log_sink      what it logs
"""
