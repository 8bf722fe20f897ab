"""llama.cpp's shared library: found, checked, loaded, declared.

source        which library is used, and where it is
choice        which library is used, and what is said of those that are not
probe_results  what probes found, remembered
guard         a loaded library's version, functions and structs, checked
library       the loaded library
declarations  its functions and structs
layout        how its state bytes are laid out
backends      what it can compute on
nvidia        where NVIDIA's libraries lie
log_sink      what it logs
"""
