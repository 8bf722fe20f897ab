"""A process of its own that takes measurements when it is asked to.

Two sides that share a process share its OpenMP threads, its heap and its environment. Each in a
process of its own, they can still take turns.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_OPENMP = ("OMP_", "GOMP_")


class PeerMissingError(Exception):
    """A peer that is to be compared with is not installed here."""


class Child:
    """Runs `python -m MODULE ARGS…`, which answers one line of JSON for each line of JSON it reads.

    No OpenMP setting of this process reaches it, unless it stands in `env`.
    """

    def __init__(self, module: str, *args: str, env: Mapping[str, str] | None = None) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OPENMP)}
        self._name = " ".join((module, *args))
        self._captured_errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            cwd=ROOT,
            env={**inherited, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._captured_errors,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, call: str, **arguments: Any) -> None:
        """Have it call `call` with `arguments`, without waiting for the answer."""
        assert self._process.stdin is not None
        print(json.dumps({"call": call, "arguments": arguments}), file=self._process.stdin, flush=True)

    def ask(self, call: str, **arguments: Any) -> Any:
        """Have it call `call` with `arguments`, and give the answer."""
        assert self._process.stdout is not None
        try:
            self.tell(call, **arguments)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            self._captured_errors.seek(0)
            said = self._captured_errors.read()
            missing = re.search(r": (No module named .+)$", said, re.MULTILINE)
            if missing:
                raise PeerMissingError(f"{self._name}: {missing[1]}")
            raise RuntimeError(f"{self._name} ended with {code}:\n{said[-4000:]}")
        return json.loads(line)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._captured_errors.close()


def serve(calls: Mapping[str, Callable[..., Any]]) -> None:
    """The other end: answer requests from standard input until it is closed."""
    # The answers go through a descriptor of their own, so that nothing printed can mix with them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(calls[request["call"]](**request["arguments"])), file=answers, flush=True)
