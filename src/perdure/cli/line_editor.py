"""What a person types."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perdure.cli.output import terminal
from perdure.events.background import BackgroundThread

_LINES = 1000
"""Of history that are kept."""
_QUOTES = '"""'
_WAKE_DELAYS = (0.02, 0.1, 0.5)
"""Seconds after a signal at which a line that is being read is made to look for it."""


class LineEditor:
    """Messages from a terminal, until Ctrl-D.

    Lines can be edited and come back with the arrow keys and Ctrl-R, in later runs too. A message of several
    lines is pasted, or typed with Alt-Enter or a backslash at the end of each line but the last, or between
    triple quotes.
    """

    def __init__(self, history: Path, words: Sequence[str]) -> None:
        self._history = history
        self._readline = _readline(history, words)

    def messages(self, prompt: Callable[[], str]) -> Iterator[str]:
        """What is typed after `prompt`. What is quoted is no command: its first slash is doubled.

        What is typed before the next prompt is there waits for it, and is shown with it.
        """
        with terminal.keys_held_back():
            while True:
                try:
                    message = self._message(prompt())
                except EOFError:
                    terminal.tell("")
                    return
                except KeyboardInterrupt:
                    terminal.tell("\nCtrl-D or /quit leaves.")
                    continue
                if message:
                    yield message

    def answer(self, question: str) -> str:
        """One line in answer to a question; nothing at Ctrl-D or Ctrl-C."""
        try:
            return self._line(question, remember=False)
        except (EOFError, KeyboardInterrupt):
            terminal.tell("")
            return ""

    def _message(self, prompt: str) -> str:
        line = self._line(prompt)
        if line.lstrip().startswith(_QUOTES):
            return self._quoted(line.lstrip().removeprefix(_QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._line("… "))
        return "\n".join(lines).strip()

    def _quoted(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(self._line("… "))
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        text = "\n".join(lines).strip()
        return f"/{text}" if text.startswith("/") else text

    def _line(self, prompt: str, *, remember: bool = True) -> str:
        if sys.stdout.isatty():
            with _interruptible(), terminal.keys_shown():
                line = input(prompt)
        else:
            # Another program reads standard output: it gets replies alone.
            print(prompt, end="", file=sys.stderr, flush=True)
            with terminal.keys_shown():
                line = sys.stdin.readline()
            if not line:
                raise EOFError
        if self._readline is not None and line.strip() and not remember:
            # An answer is no message to come back to.
            self._readline.remove_history_item(self._readline.get_current_history_length() - 1)
        elif self._readline is not None and line.strip():
            # At once, so that it is there whatever ends this process. A history that cannot be kept is none.
            with contextlib.suppress(OSError, AttributeError):
                self._readline.append_history_file(1, str(self._history))
        return line.rstrip("\n").encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """While this is open, no signal waits for the next key.

    One that comes while the prompt is being drawn is noted by Python, but the wait for a key that follows
    does not know of it. Another signal, which means nothing, ends that wait.
    """
    main = threading.main_thread().ident
    if not hasattr(signal, "pthread_kill") or threading.get_ident() != main:
        yield
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    over = threading.Event()

    def wake_reader() -> None:
        while data := reading.recv(64):
            if set(data) != {signal.SIGURG}:
                for seconds in _WAKE_DELAYS:
                    if not over.wait(seconds):
                        signal.pthread_kill(main, signal.SIGURG)

    handler = signal.signal(signal.SIGURG, lambda number, frame: None)
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    thread = BackgroundThread(wake_reader, name="perdure-wake-reader")
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        writing.close()
        thread.join()
        reading.close()
        signal.signal(signal.SIGURG, handler)


def _readline(history: Path, words: Sequence[str]) -> Any:
    """The module that makes `input` comfortable, where there is one."""
    try:
        import readline
    except ImportError:
        return None

    def complete(text: str, number: int) -> str | None:
        matches = [word for word in words if word.startswith(text)] if text.startswith("/") else []
        return f"{matches[number]} " if number < len(matches) else None

    with contextlib.suppress(OSError):
        history.parent.mkdir(parents=True, exist_ok=True)
        if not history.exists():
            history.touch(mode=0o600)
        readline.read_history_file(str(history))
    readline.set_history_length(_LINES)
    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    # Alt-Enter ends a line of a message and not the message, as a backslash before Enter does.
    readline.parse_and_bind(r'"\e\C-m": "\\\C-m"')
    return readline
