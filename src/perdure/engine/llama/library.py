"""The shared library: loaded once, its threads tamed, its log lines sent to `logging`."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

log = logging.getLogger("perdure.llama")
# Without this, Python prints the lines of a program that never set up logging to stderr.
log.addHandler(logging.NullHandler())
# A library is silent unless its user asks to hear it.
log.addHandler(logging.NullHandler())

# ggml's threads spin between nodes. As shipped they spin so long that one other busy process costs
# five sixths of the speed; this count costs nothing on an idle machine. libgomp reads it once, when
# it is loaded. Users who set their own keep it.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

# The library calls its chatter INFO; nobody who runs a model wants to read it.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
_CONTINUED = 5


class _LogLines:
    """Puts the library's fragments together into lines."""

    def __init__(self) -> None:
        self.last_error = ""
        self.muted = False
        self._level = logging.DEBUG
        self._text = ""

    def __call__(self, level: int, text: bytes | None, _: object) -> None:
        if level != _CONTINUED:
            self._level = _LEVELS.get(level, logging.DEBUG)
        self._text += (text or b"").decode("utf-8", "replace")
        while "\n" in self._text:
            line, self._text = self._text.split("\n", 1)
            if line.strip() and not self.muted:
                if self._level == logging.ERROR:
                    self.last_error = line.strip()
                log.log(self._level, "%s", line.rstrip())


class _Ears:
    """The two functions that the library can send its lines to: ours, and one that ignores them.

    Both are held for the life of the process: the library keeps only a pointer.
    """

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self._lines = lib.llama_log_callback(_lines)
        self._nothing = ctypes.cast(ctypes.CDLL(None).getpid, lib.llama_log_callback)
        self._open = False
        # At exit Python can no longer be called.
        atexit.register(self.shut)
        self.open()

    def open(self) -> None:
        if not self._open:
            self._open = True
            self._lib.llama_log_set(self._lines, None)

    def shut(self) -> None:
        self._open = False
        self._lib.llama_log_set(self._nothing, None)


_lines = _LogLines()


def last_error() -> str:
    """The library's last line of complaint: it gives its reasons nowhere else."""
    return _lines.last_error or "no reason given"


@contextmanager
def muted() -> Iterator[None]:
    """Drop the log lines of a call that is meant to be refused."""
    _lines.muted = True
    try:
        yield
    finally:
        _lines.muted = False


@functools.cache
def load() -> Any:
    """llama-cpp-python's ctypes module, with the backends started."""
    from llama_cpp import llama_cpp as lib

    ears()
    lib.llama_backend_init()
    return lib


@functools.cache
def ears() -> _Ears:
    """Where the library's lines go."""
    from llama_cpp import llama_cpp as lib

    return _Ears(lib)


@functools.cache
def build() -> str:
    """Which engine this is, as far as it changes what state bytes mean."""
    import llama_cpp

    assert isinstance(llama_cpp, ModuleType)
    return f"llama.cpp {load().llama_version().decode()} (llama-cpp-python {llama_cpp.__version__})"


def default_threads() -> int:
    """One thread a core that this process may use; hyper-threads do not help, but cannot be told apart."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:
        return max(1, os.cpu_count() or 1)
