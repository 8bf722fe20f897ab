"""The CPU threads of one context, kept between steps and asleep while there is none."""

from __future__ import annotations

from ctypes import byref
from typing import Any

from perdure import system
from perdure.engine.llama.native.declarations import (
    MAX_THREADS,
    FreeThreadpool,
    Functions,
    NewThreadpool,
    ThreadpoolParams,
)

_POLL = 0
"""How long a thread looks for the next step before it sleeps, from 0 to 100.

A thread that polls uses up its share of a core that another process wants, and then is not there when
the step comes: everybody waits for it at the next barrier.
"""


class Threadpool:
    """Owns one `ggml_threadpool`. A library without one of its own (none given) makes its threads itself.

    Always holds: it is freed once, and by `close` only, after the context that used it. Outside of a `with`
    over it the caller's thread may use the cores that it could use before.

    Where every core has a thread, each is kept on its own: they wait for each other by spinning, some
    hundred times a step, and two of them on one core (the other taken by another process) would wait for a
    turn of the scheduler each time.
    """

    def __init__(self, lib: Functions, threads: int) -> None:
        self._handle: int | None = None
        self._cores: tuple[int, ...] = ()
        cpu = lib.ggml_backend_reg_by_name(b"CPU")
        new, free = (_address(lib, cpu, name) for name in (b"ggml_threadpool_new", b"ggml_threadpool_free"))
        if threads == 1 or not new or not free:
            return
        params = ThreadpoolParams()
        lib.ggml_threadpool_params_init(byref(params), threads)
        params.poll = _POLL
        cores = system.core_ids()
        openmp = b"OPENMP = 1" in lib.llama_print_system_info()
        if threads == len(cores) and max(cores) < MAX_THREADS and not openmp:
            self._cores = cores
            params.strict_cpu = True
            for core in cores:
                params.cpumask[core] = True
        self._handle = NewThreadpool(new)(byref(params))
        self._free = FreeThreadpool(free)
        if self._cores:
            # The pool keeps its first thread, which is the caller's, on the last core from now on.
            system.use_cores(cores)

    def __enter__(self) -> None:
        """Have the caller's thread on the core that the others leave to it, during a step."""
        if self._cores:
            system.use_cores(self._cores[-1:])

    def __exit__(self, *_: object) -> None:
        if self._cores:
            system.use_cores(self._cores)

    def attach(self, lib: Functions, context: Any) -> None:
        """Have the steps of `context`, long and short, run on these threads."""
        if self._handle:
            lib.llama_attach_threadpool(context, self._handle, self._handle)

    def close(self) -> None:
        if self._handle:
            handle, self._handle = self._handle, None
            self._free(handle)


def _address(lib: Functions, backend: Any, name: bytes) -> int | None:
    found: int | None = lib.ggml_backend_reg_get_proc_address(backend, name) if backend else None
    return found
