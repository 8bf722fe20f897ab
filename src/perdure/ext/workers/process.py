"""One process with an engine, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass

from perdure.ext.workers.connection import Connection
from perdure.ext.workers.protocol import Setup
from perdure.spi.base import processes, system

_TAIL = 8192
_LINES = 40
_LOG_LIMIT = 1 << 20
_LINGER = 5.0
"""Seconds that a process may take to be gone once its end of the connection is: it may be dumping core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitInfo:
    """How a process ended, and what it said last."""

    reason: str
    signal: str | None
    code: int | None
    said: str
    killed: bool = False
    """Whether it was ended from this side."""

    def __str__(self) -> str:
        return f"{self.reason}\n{self.said}" if self.said else self.reason


class Process:
    """Owns a child, its socket and the file that it complains into. `wait_exit` gives all three back.

    The thread that makes it must outlive the child: the system ends the child with that thread.
    """

    def __init__(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            self._log = undo.enter_context(tempfile.TemporaryFile())
            # A new process group: the terminal's signals are for the parent alone.
            self._child = subprocess.Popen(
                processes.isolated_python(
                    "-X", "faulthandler", "-m", "perdure.ext.workers.child", str(theirs.fileno())
                ),
                stdout=self._log,
                stderr=self._log,
                **processes.child_options(theirs.fileno()),
            )
            undo.pop_all()
        self.connection = Connection(ours)
        self.connection.send(setup)
        self._kill_reason: str | None = None

    @property
    def pid(self) -> int:
        return self._child.pid

    def rss(self) -> int | None:
        """Its resident bytes, where the system reports it."""
        return system.resident_memory(self.pid)

    def trim_log(self) -> None:
        """Keep what it writes from filling the disk."""
        if os.fstat(self._log.fileno()).st_size > _LOG_LIMIT:
            self._log.truncate(0)

    def kill(self, why: str) -> None:
        """End it now. `why` is what its death will be put down to."""
        self._kill_reason = self._kill_reason or why
        self._child.kill()

    def wait_exit(self) -> ExitInfo:
        """Wait for its end, after so long by force, and give everything back."""
        self.connection.close()
        try:
            code = self._child.wait(_LINGER)
        except subprocess.TimeoutExpired:
            self._child.kill()
            code = self._child.wait()
        output = self._said()
        self._log.close()
        name = signal.Signals(-code).name if code < 0 else None
        how = f"was ended by {name}" if name else f"exited with code {code}"
        if name == "SIGKILL":
            how += ", which the system sends when memory runs out"
        reason = f"the engine's process {self.pid} {how}"
        if self._kill_reason is not None:
            reason = f"the engine's process {self.pid} was ended: {self._kill_reason}"
        return ExitInfo(
            reason=reason,
            signal=name,
            code=None if name else code,
            said=output,
            killed=self._kill_reason is not None,
        )

    def _said(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _TAIL, max(0, size - _TAIL)).decode("utf-8", "replace")
        return "\n".join(line for line in tail.splitlines()[-_LINES:] if line.strip())


UNRESPONSIVE = 5.0
"""Seconds of silence after which an idle engine is not called ready any more."""
