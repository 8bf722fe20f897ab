"""Other processes on the same store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
NOBODY = 65534
_PATH = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


def start(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Run `code` in a separate process, with `arguments` in sys.argv, talking through pipes."""
    environment = {**os.environ, "PYTHONPATH": _PATH, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-B", "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | options.pop("environment", {}),
        **options,
    )


def run(code: str, *arguments: object, **options: Any) -> str:
    """What `code` prints; it must end well."""
    with start(code, *arguments, **options) as child:
        out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    return out


@contextmanager
def holding(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that has printed its first line, and waits for a line on its standard input."""
    with start(code, *arguments) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "ready\n", child.stderr.read() if child.stderr else ""
            yield child
        finally:
            if child.poll() is None:
                child.kill()


def become_nobody() -> None:
    """Give root's rights up, for good: permissions do not apply to root."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
