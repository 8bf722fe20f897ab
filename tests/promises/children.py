"""Child processes: what ends one by a signal is noticed, and the last line says in which case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    """How a child ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    def __str__(self) -> str:
        how = signal.Signals(-self.code).name if self.code < 0 else f"code {self.code}"
        return f"{how} after {self.lines[-1:]}\n{self.err[-3000:]}"


def run(module: str, *args: object, **environment: str) -> Ended:
    """Run a module of this folder as a program and wait for its end."""
    # An abort must not call up a debugger.
    env = os.environ | {"GGML_NO_BACKTRACE": "1", "PYTHONWARNINGS": "error"} | environment
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", f"promises.{module}", *map(str, args)],
        cwd=TESTS,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)
