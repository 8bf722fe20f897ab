"""The shared library: loaded once, its threads tamed, its log lines sent to `logging`."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from perdure.engine.llama import guard, probe
from perdure.engine.llama.backends import load_backends
from perdure.engine.llama.declarations import Functions, LogCallback
from perdure.engine.llama.source import WAYS, LibrarySource
from perdure.errors import EngineLibraryError

log = logging.getLogger("perdure.llama")
# Without this, Python prints the lines of a program that never set up logging to stderr.
log.addHandler(logging.NullHandler())

# ggml's threads spin between nodes. As shipped they spin so long that one other busy process costs
# five sixths of the speed; this count costs nothing on an idle machine. libgomp reads it once, when
# it is loaded. Users who set their own keep it.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

# The library calls its chatter INFO; nobody who runs a model wants to read it.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
_CONTINUED = 5
_STEMS = ("ggml-base", "ggml-cpu", "ggml", "llama")
"""The shared libraries of a build, each after those it needs. A build may lack some of them."""


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


class LogSink:
    """The two functions that the library can send its lines to: ours, and one that ignores them.

    Both are held for the life of the process: the library keeps only a pointer.
    """

    def __init__(self, lib: Functions) -> None:
        self._lib = lib
        self._lines = LogCallback(_lines)
        self._nothing = ctypes.cast(ctypes.CDLL(None).getpid, LogCallback)
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


class Library:
    """One loaded llama.cpp: its functions, where they came from, and how it is used here.

    Always holds: it was checked against the declarations, its backends are loaded, and its lines go to
    `logging`.
    """

    def __init__(
        self,
        source: LibrarySource,
        *,
        variant: str | None = None,
        gpu: bool = True,
        extra_buffers: bool = True,
    ) -> None:
        self.source = source
        self.extra_buffers = extra_buffers
        """Whether weights may be laid out anew for special units of the CPU, such as AMX."""
        self._handles = _open(source)
        self.functions = Functions(self._handles)
        guard.check(self.functions, source.folder)
        self.log_sink = LogSink(self.functions)
        self.variant = load_backends(self.functions, source.folder, variant, gpu=gpu)
        self.functions.llama_backend_init()
        self.version = self.functions.llama_version().decode()

    @property
    def name(self) -> str:
        """Which engine this is, as far as it changes what state bytes mean."""
        return f"llama.cpp {self.version} ({self.source.kind} {self.source.version}, {self.variant})"


def _open(source: LibrarySource) -> list[ctypes.CDLL]:
    """The shared libraries of `source`, opened so that each finds those it needs already there."""
    handles = []
    try:
        for stem in _STEMS:
            path = source.file(stem)
            if path is not None:
                handles.append(ctypes.CDLL(str(path)))
    except OSError as error:
        raise EngineLibraryError(
            f"the library at {source.folder} cannot be loaded: {error}. {WAYS}", tried=(str(source),)
        ) from None
    # Most functions are in the last one.
    return handles[::-1]


@functools.cache
def loaded() -> Library:
    """The library of this process, loaded when it is first asked for."""
    chosen = probe.choose()
    verdict = chosen.verdict
    return Library(
        chosen.source, variant=verdict.variant, gpu=verdict.gpu, extra_buffers=verdict.extra_buffers
    )


def load() -> Any:
    """The functions of the library of this process."""
    return loaded().functions


def log_sink() -> LogSink:
    """Where the library's lines go."""
    return loaded().log_sink


def build() -> str:
    """Which engine this is, as far as it changes what state bytes mean."""
    return loaded().name


def default_threads() -> int:
    """One thread a core that this process may use; hyper-threads do not help, but cannot be told apart."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:
        return max(1, os.cpu_count() or 1)
