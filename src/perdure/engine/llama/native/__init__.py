"""llama.cpp's shared library: found, tried in a child process, checked, loaded, declared.

source        which library is used, and where it is
choice        which library is used, and what is said of those that are not
probe         whether a library runs here, found out in a child process
probe_results  what probes found, remembered
causes        why a library or its GPU does not run, in a sentence and with advice
probe_child   that process; it may die
toy_gguf      the tiny models that it runs
guard         a loaded library's version, functions and structs, checked
library       the loaded library
declarations  its functions and structs
layout        how its state bytes are laid out
backends      what it can compute on
log_sink      what it logs
"""
