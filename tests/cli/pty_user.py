"""Somebody at a terminal, and somebody with a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cli import forked
from homes import new_home

COMMAND = [sys.executable, "-m", "perdure.cli"]
PATIENCE = 60.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


def plain(text: str) -> str:
    """What a screen shows, without what only tells it how."""
    return _ESCAPES.sub("", text)


def terminal_environment(model: Path, home: Path, *, term: str) -> dict[str, str]:
    """The variables of a user at a terminal of a kind, with a home of his own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    return {
        **kept,
        "PERDURE_MODEL": str(model),
        "PERDURE_HOME": str(new_home(home)),
        "TERM": term,
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }


def piped(
    environment: Mapping[str, str], text: str | bytes | None, *arguments: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The command to its end, with a text from a pipe; None is no input."""
    done = forked.run(arguments, environment, text.encode() if isinstance(text, str) else text, cwd)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


class PtyUser:
    """A user at a terminal, with the command as its child."""

    def __init__(self, screen: int, process: subprocess.Popen[bytes]) -> None:
        self._screen = screen
        self._seen = b""
        self.shown = b""
        """All that the command has sent to the terminal."""
        self.process = process

    def type(self, text: str) -> None:
        """Press keys. What the command shows meanwhile is read, else neither would get on."""
        rest = text.encode()
        while rest:
            readable, writable, _ = select.select([self._screen], [self._screen], [], PATIENCE)
            assert readable or writable, f"it does not read: {self._seen!r}"
            if readable:
                self._read()
            if writable:
                rest = rest[os.write(self._screen, rest[:512]) :]

    def paste(self, text: str) -> None:
        """As terminals tell a program that text was pasted."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def until(self, pattern: str) -> str:
        """Read on until the screen shows `pattern` after what was read before; what came up to its end."""
        start, computed = time.monotonic(), self._computed()
        ends = start + PATIENCE
        while not (match := re.search(pattern, self._text(), re.DOTALL)):
            readable, _, _ = select.select([self._screen], [], [], max(0.0, ends - time.monotonic()))
            if not readable:
                # On a machine that many others use, a start can take longer than that: `serve` once did.
                before, computed = computed, self._computed()
                goes_on = computed > before and time.monotonic() < start + 5 * PATIENCE
                assert goes_on, f"no {pattern!r} in {self._text()!r}"
                ends = time.monotonic() + PATIENCE
                continue
            try:
                self._read()
            except OSError:
                raise AssertionError(f"it ended without {pattern!r}: {self._text()!r}") from None
        text = self._text()
        self._seen = text[match.end() :].encode()
        return text[: match.end()]

    def _computed(self) -> int:
        """Ticks of the processor that the command has had; 0 where the system does not tell them."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return 0
        user, kernel = stat.rpartition(")")[2].split()[11:13]
        return int(user) + int(kernel)

    @property
    def is_there(self) -> bool:
        """Whether the window is open."""
        return self._screen >= 0

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Read on until `condition` holds."""
        ends = time.monotonic() + PATIENCE
        while not condition():
            readable, _, _ = select.select([self._screen], [], [], max(0.0, ends - time.monotonic()))
            assert readable, f"it never came: {self._text()!r}"
            self._read()

    def hang_up(self) -> None:
        """Close the window."""
        os.close(self._screen)
        self._screen = -1

    def leaves(self) -> int:
        """Read what is left, and the exit code."""
        while True:
            readable, _, _ = select.select([self._screen], [], [], PATIENCE)
            assert readable, f"it does not leave: {self._text()!r}"
            try:
                self._read()
            except OSError:
                return self.process.wait(PATIENCE)

    def _read(self) -> None:
        data = os.read(self._screen, 65536)
        if not data:
            raise OSError("the terminal was closed")
        self._seen += data
        self.shown += data

    def _text(self) -> str:
        return self._seen.decode("utf-8", "ignore").replace("\r\n", "\n").replace("\r", "")


def _take_terminal() -> None:
    """As a shell in a new window starts a command, also where these tests were started by nohup."""
    # Ctrl-C reaches the process only if this is its terminal.
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def terminal(
    environment: dict[str, str],
    *arguments: str,
    columns: int = 200,
    rows: int = 24,
    command: Sequence[str] = COMMAND,
) -> Iterator[PtyUser]:
    screen, inner = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with subprocess.Popen(
        [*command, *arguments],
        env=environment,
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        preexec_fn=_take_terminal,
    ) as process:
        os.close(inner)
        user = PtyUser(screen, process)
        try:
            yield user
        finally:
            process.kill()
            if user.is_there:
                os.close(screen)
