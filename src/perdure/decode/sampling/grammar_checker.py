"""Grammar checker: compiles a grammar in a child process first, where its death or its delay costs nothing.

`llguidance` is native code: a schema of 60 bytes can end the process that compiles it, another one takes
minutes. Each grammar that is new here goes through `check`, from any client. The child starts with the
first one (0.1 s), takes 1 ms for a usual schema, and ends after a minute without any.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from perdure import system
from perdure.decode.sampling.grammar_child import CPU_SECONDS, STEP_SECONDS
from perdure.errors import BusyError, GrammarError
from perdure.events.background import BackgroundTimer
from perdure.system import processes

_WALL_SECONDS = 30.0
"""For one grammar, where the machine gives the child no time to reach its own limit."""
_AT_ONCE = 4
"""Grammars that are compiled at once, and of them those of one namespace."""
_SHARE = 2
_TURN_SECONDS = 20.0
"""That a grammar waits for its turn."""


_OVER_LIMIT = -getattr(signal, "SIGXCPU", 0)
"""How a child ends that takes more time than it may."""


class GrammarLate(Exception):
    """The deadline passed before the grammar was compiled."""


class GrammarTimeout(GrammarError):
    """The grammar could not be checked just now: it may be fine."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the child needs to know of a model's tokens: how many, and its control tokens."""

    n_vocab: int
    marks: tuple[tuple[int, bytes], ...] = ()


class Checker:
    """Child processes that compile grammars, as many as there are grammars at once.

    Always holds: a child has one grammar at a time; one that died is not used again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._compiling: Counter[str] = Counter()
        self._idle: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def turn(self, namespace: str, deadline: float | None) -> Iterator[None]:
        """Wait until a grammar of `namespace` may be compiled: one that sends many leaves room for others."""
        until = time.monotonic() + _TURN_SECONDS
        if deadline is not None:
            until = min(until, deadline)
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_free(namespace), until - time.monotonic()):
                if until == deadline:
                    raise GrammarLate
                raise BusyError(
                    f"other grammars have been compiling for {_TURN_SECONDS:g} s; try again later",
                    waiting=self._compiling.total(),
                    limit=_AT_ONCE,
                )
            self._compiling[namespace] += 1
        try:
            yield
        finally:
            with self._changed:
                self._compiling[namespace] -= 1
                self._compiling += Counter()
                self._changed.notify_all()

    def _is_free(self, namespace: str) -> bool:
        return self._compiling[namespace] < _SHARE and self._compiling.total() < _AT_ONCE

    def check(
        self, kind: str, text: str, vocabulary: Vocabulary, deadline: float | None = None, begins: str = ""
    ) -> None:
        """GrammarError for a grammar that kills or holds the process that compiles it. Whether it compiles is
        not said. Tokens are tried behind a reply that `begins` so."""
        marks = [(token, mark.decode("latin-1")) for token, mark in vocabulary.marks]
        job = {"kind": kind, "text": text, "n_vocab": vocabulary.n_vocab, "marks": marks}
        job["begins"] = begins
        data = json.dumps(job).encode() + b"\n"
        code = self._run(kind, data, deadline)
        if code and code != _OVER_LIMIT:
            # Another process may have killed that child.
            code = self._run(kind, data, deadline)
        if code == _OVER_LIMIT:
            raise GrammarError(f"this {kind} takes more than {CPU_SECONDS} s to compile: simplify it")
        if code:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise GrammarError(f"this {kind} ends the process that compiles it ({name}): simplify it")

    def _run(self, kind: str, data: bytes, deadline: float | None) -> int:
        """How a child ended that `data` was sent to: its exit code, or 0 where it lives."""
        while True:
            with self._changed:
                idle = self._idle.pop() if self._idle else None
            child = idle or start_child()
            killed = threading.Event()
            left = _WALL_SECONDS if deadline is None else min(_WALL_SECONDS, deadline - time.monotonic())
            timer = BackgroundTimer(max(0.0, left), _kill, child, killed, name="perdure-grammar")
            timer.start()
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                with suppress(BrokenPipeError):
                    child.stdin.write(data)
                    child.stdin.flush()
                answer = child.stdout.readline(64)
            except BaseException:
                child.kill()
                raise
            finally:
                timer.cancel()
            if answer and not killed.is_set():
                with self._changed:
                    self._idle.append(child)
                if answer == b"slow\n":
                    raise GrammarError(
                        f"a token under this {kind} takes more than {STEP_SECONDS:g} s: simplify it"
                    )
                return 0
            code = reap(child)
            if killed.is_set():
                if deadline is not None and time.monotonic() >= deadline:
                    raise GrammarLate
                raise GrammarTimeout(f"this {kind} was not compiled in {_WALL_SECONDS:g} s; try again later")
            if code or idle is None:
                return code or 1
            # It had been idle for too long, and ended by itself.

    def close(self) -> None:
        """End the children that wait."""
        with self._changed:
            idle, self._idle = self._idle, []
        for child in idle:
            child.kill()
            reap(child)

    def forget(self) -> None:
        """Leave the children to the process that this one was forked from."""
        self._changed = threading.Condition()
        self._compiling = Counter()
        self._idle = []


def start_child() -> subprocess.Popen[bytes]:
    script = str(Path(__file__).with_name("grammar_child.py"))
    # A Ctrl-C in the terminal is not for it, nor are its last words for the terminal.
    try:
        return subprocess.Popen(
            processes.isolated_python(script, json.dumps(sys.path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0 if system.POSIX else None,
        )
    except OSError as error:
        raise GrammarTimeout(f"no process can be started to compile the grammar in: {error}") from None


def _kill(child: subprocess.Popen[bytes], ended: threading.Event) -> None:
    ended.set()
    child.kill()


def reap(child: subprocess.Popen[bytes]) -> int:
    with child, suppress(BrokenPipeError):
        if child.stdin is not None:
            child.stdin.close()
    return child.wait()


checker = Checker()
"""That of this process: one child serves all its models."""
atexit.register(checker.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=checker.forget)
