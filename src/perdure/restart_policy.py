"""When a process with an engine is started again, and how long it is waited for."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.checks import is_number, is_whole
from perdure.errors import InvalidInputError

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
    """Starts that may fail in a row before waiting requests get the error."""
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
