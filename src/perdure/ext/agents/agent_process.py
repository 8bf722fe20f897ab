"""The process of an agent that `perdure launch` started.

It ends with `launch`, and the title of the terminal says how much of its first prompt is read.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from perdure.spi.base import processes, system
from perdure.spi.runtime import BackgroundThread, BackgroundTimer

_GRACE = 5.0
"""Seconds that an agent has to end by itself, once `launch` was asked to end."""
_LOOK = 1.0
"""Seconds between two looks at how much is read."""


def run_agent(command: list[str], environment: dict[str, str], folder: Path | None) -> int:
    """Start a program, wait for its end, and give its exit code.

    A signal that asks this process to end goes to the program and to what it has started. Ctrl-C is between
    the program and the terminal.
    """
    # Where no terminal is to be shared, a separate group of processes can be ended as a whole.
    apart = system.POSIX and not sys.stdin.isatty()
    asked: list[int] = []
    signals = (signal.SIGINT, *processes.ending_signals())
    before = {each: signal.signal(each, lambda number, _: asked.append(number)) for each in signals}
    try:
        child = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            cwd=folder,
            process_group=0 if apart else None,
        )

        def end(number: int, _: FrameType | None) -> None:
            if apart or number != signal.SIGINT:
                _signal(child, number, apart)
            if number != signal.SIGINT:
                BackgroundTimer(_GRACE, _kill, child, apart, name="perdure-launch-kill").start()

        for each in signals:
            signal.signal(each, end)
        for number in asked:
            end(number, None)
        code = child.wait()
        if apart:
            # What it has left behind.
            _signal(child, signal.SIGTERM, apart)
        return 128 - code if code < 0 else code
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _signal(child: subprocess.Popen[bytes], number: int, apart: bool) -> None:
    """Send a signal to a program and to what it has started, as far as that is known to be its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if apart:
            os.killpg(child.pid, number)
        elif system.POSIX and os.getpgrp() == os.getpid():
            # The shell has started this as a job: all of the group is `launch` and what it started.
            before = signal.signal(number, signal.SIG_IGN)
            os.killpg(0, number)
            signal.signal(number, before)
        else:
            child.send_signal(number)


def _kill(child: subprocess.Popen[bytes], apart: bool) -> None:
    """End a program that did not end when it was asked to."""
    if apart:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()


class ReadingInTitle:
    """While it is open, the title of the terminal says how many tokens of a first prompt are read."""

    def __init__(self, client: str, first_prompt: int, tokens_read: Callable[[], int | None]) -> None:
        self._client = client
        self._first_prompt = first_prompt
        self._tokens_read = tokens_read
        """None while nothing is read."""
        self._over = threading.Event()
        self._thread = BackgroundThread(self._follow, name="perdure-launch-title")

    def __enter__(self) -> None:
        if self._first_prompt and sys.stderr.isatty():
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _follow(self) -> None:
        begun = False
        while not self._over.wait(_LOOK):
            tokens = self._tokens_read()
            if tokens is not None:
                begun = True
                self._show(f"{self._client}: {tokens:,} of about {self._first_prompt:,} tokens read")
            elif begun:
                break
        self._show("")

    def _show(self, title: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"\x1b]2;{title}\x07")
            sys.stderr.flush()
