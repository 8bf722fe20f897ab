"""The library's log: its lines sent to `logging`, and its errors kept for error messages."""

from __future__ import annotations

import atexit
import ctypes
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from perdure import system
from perdure.engine.llama.native.declarations import Functions, LogCallback

log = logging.getLogger("perdure.llama")
# Without this, Python prints the lines of a program that never set up logging to stderr.
log.addHandler(logging.NullHandler())

# The library calls its chatter INFO; nobody who runs a model wants to read it.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
_CONTINUED = 5
_FUNCTION = re.compile(r"^(?:(?:[a-z0-9_]+|error loading model): )+")
_NO_REASON = re.compile(r"failed to (?:load model|initialize the context|apply lora adapter).{0,300}")
_LONGEST_REASON = 500


class CapturedErrors:
    """The lines in which the library says why a call failed: it gives its reasons nowhere else."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __str__(self) -> str:
        """The reasons, without the names of functions and the line that only says that it failed."""
        reasons = [_FUNCTION.sub("", line) for line in self.lines]
        useful = [reason for reason in reasons if reason and not _NO_REASON.fullmatch(reason)] or reasons
        return "; ".join(dict.fromkeys(useful))[:_LONGEST_REASON] or "no reason given"


class _LogLines:
    """Puts the library's fragments together into lines."""

    def __init__(self) -> None:
        self.captured: dict[int, CapturedErrors] = {}
        """By thread, what collects the reasons of a failing call."""
        self._level = logging.DEBUG
        self._text = ""

    def __call__(self, level: int, text: bytes | None, _: object) -> None:
        if level != _CONTINUED:
            self._level = _LEVELS.get(level, logging.DEBUG)
        self._text += (text or b"").decode("utf-8", "replace")
        while "\n" in self._text:
            line, self._text = self._text.split("\n", 1)
            if line.strip():
                heard = self.captured.get(threading.get_ident())
                if self._level == logging.ERROR and heard is not None:
                    heard.lines.append(line.strip())
                log.log(self._level, "%s", line.rstrip())


class LogSink:
    """The two functions that the library can send its lines to: ours, and one that ignores them.

    Both are held for the life of the process: the library keeps only a pointer.
    """

    def __init__(self, lib: Functions) -> None:
        self._lib = lib
        self._lines = LogCallback(_lines)
        # A function of C, which can be called whatever state Python is in.
        ignore = system.c_function("getpid") or system.c_function("_getpid")
        self._nothing = ctypes.cast(ignore, LogCallback) if ignore else LogCallback(lambda *_: None)
        self._shut_by: set[int] = set()
        # At exit Python can no longer be called.
        atexit.register(self.shut, 0)
        lib.llama_log_set(self._lines, None)

    def open(self, owner: int) -> None:
        """Take back `shut`. Lines are heard again when nobody has it shut."""
        if owner in self._shut_by:
            # Before as well: a Ctrl-C in between would leave it shut, with nobody to open it.
            if self._shut_by == {owner}:
                self._lib.llama_log_set(self._lines, None)
            self._shut_by.discard(owner)
            if not self._shut_by:
                self._lib.llama_log_set(self._lines, None)

    def shut(self, owner: int) -> None:
        """Ignore all lines until `owner` opens it again."""
        self._shut_by.add(owner)
        self._lib.llama_log_set(self._nothing, None)

    @contextmanager
    def muted(self, owner: int) -> Iterator[None]:
        """Ignore the lines of a call that is meant to be refused, or whose lines are noise.

        A Ctrl-C that arrives while Python reads a line is lost.
        """
        try:
            self.shut(owner)
            yield
        finally:
            self.open(owner)


_lines = _LogLines()


@contextmanager
def captured_errors() -> Iterator[CapturedErrors]:
    """What the library complains about in this thread, meanwhile."""
    errors = CapturedErrors()
    thread = threading.get_ident()
    _lines.captured[thread] = errors
    try:
        yield errors
    finally:
        del _lines.captured[thread]
