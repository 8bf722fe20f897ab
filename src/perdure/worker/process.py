"""One process with an engine, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Literal

from perdure import system
from perdure.checks import is_number, is_whole
from perdure.errors import InvalidInputError
from perdure.worker.connection import Connection
from perdure.worker.protocol import Setup

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
            # A group of its own: the terminal's signals are for the parent alone.
            self._child = subprocess.Popen(
                system.isolated_python(
                    "-X", "faulthandler", "-m", "perdure.worker.child", str(theirs.fileno())
                ),
                stdout=self._log,
                stderr=self._log,
                **system.child_options(theirs.fileno()),
            )
            undo.pop_all()
        self.connection = Connection(ours)
        self.connection.send(setup)
        self._kill_reason: str | None = None

    @property
    def pid(self) -> int:
        return self._child.pid

    def rss(self) -> int | None:
        """Its resident bytes, where the system tells."""
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
        return ExitInfo(reason=reason, signal=name, code=None if name else code, said=output)

    def _said(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _TAIL, max(0, size - _TAIL)).decode("utf-8", "replace")
        return "\n".join(line for line in tail.splitlines()[-_LINES:] if line.strip())


# Restart policy: when the engine's process is started again, and when it is given up.

State = Literal[
    "starting", "ready", "unresponsive", "restarting", "unloading", "unloaded", "failed", "closed"
]

UNRESPONSIVE = 5.0
"""Seconds of silence after which an idle engine is not called ready any more."""
_IDLE = (2.0, 15.0)
"""Seconds of silence after which an idle engine hangs: no less, and no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Limits and patience, in seconds and bytes. Checked when it is made."""

    backoff: float = 0.1
    """Before the first restart; each further one waits twice as long."""
    backoff_limit: float = 10.0
    healthy: float = 60.0
    """After so long without a death, the next restart is the first again."""
    attempts: int = 5
    """Starts that may fail in a row before those who wait are told so."""
    start_timeout: float = 600.0
    hang_timeout: float = 60.0
    """How long one step may take while there is work. An idle engine has 15 seconds at most."""
    memory_limit: int | None = None
    """Resident bytes above which the process is replaced; None: no limit."""
    grace: float = 30.0
    """How long a close may take before the process is killed."""

    def __post_init__(self) -> None:
        for name in ("backoff", "backoff_limit", "healthy", "start_timeout", "hang_timeout", "grace"):
            value = getattr(self, name)
            if not is_number(value) or not value > 0:
                raise InvalidInputError(f"{name} is a number of seconds above 0, got {value!r}")
        for name in ("attempts", "memory_limit"):
            value = getattr(self, name)
            optional = name == "memory_limit" and value is None
            if not optional and (not is_whole(value) or value < 1):
                raise InvalidInputError(f"{name} is a whole number from 1, got {value!r}")

    def silence_limit(self, *, working: bool) -> float:
        """Seconds of silence after which an engine hangs."""
        shortest, longest = _IDLE
        return self.hang_timeout if working else max(shortest, min(longest, self.hang_timeout))


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How the engine's process is now."""

    state: State
    restarts: int
    last_death: str | None
    """Why the last process ended that was not asked to."""
    pid: int | None
    rss: int | None
    """Resident bytes, where the system tells."""
    uptime: float | None
    """Seconds since it was ready."""
