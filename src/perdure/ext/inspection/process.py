"""An analysis in a child process, so that no reply waits for it or ends with it.

It loads the model a second time (weights that are mapped are shared), at the lowest priority. A crash, or a
machine that runs out of memory, ends that process alone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import IO

from perdure import EngineDiedError, EngineError, PerdureError
from perdure.ext.inspection.analysis import ReplyFigures, check_length
from perdure.spi.base import errors, processes, read_lines
from perdure.spi.runtime import SecondOpening

log = logging.getLogger("perdure.ext.inspection")

_TAIL = 2048
_PAGE_BYTES = 256 << 20
"""Of a page: each token has its figures in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisJob:
    """What is looked at: tokens of a conversation, of which the first `prompt` were read for a reply."""

    opening: SecondOpening
    tokens: Sequence[int]
    prompt: int
    title: str
    figures: ReplyFigures

    def __post_init__(self) -> None:
        check_length(len(self.tokens))

    def to_json(self) -> str:
        opening = self.opening
        return json.dumps(
            {
                "path": opening.path,
                "adapters": dict(opening.adapters),
                "rope": opening.rope,
                "tokens": list(self.tokens),
                "prompt": self.prompt,
                "title": self.title,
                "figures": asdict(self.figures),
            }
        )


@dataclass(frozen=True, slots=True)
class AnalysisProgress:
    """What is done now, how much of it, and of how much; 0 where that is not known."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class AnalysisPage:
    """A finished analysis as HTML, and what is missing in it."""

    page: str
    notes: tuple[str, ...]


class AnalysisProcess:
    """One analysis. `run` is called once, by one thread; `cancel` by any, at any time."""

    def __init__(self, job: AnalysisJob) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """End it. The thread that runs it gets an `EngineDiedError` soon."""
        with self._lock:
            self._cancelled = True
            if self._child is not None:
                self._child.kill()

    def run(self) -> Iterator[AnalysisProgress | AnalysisPage]:
        """How it goes on, and at last the page. The process is gone when this ends, however it does."""
        with tempfile.TemporaryFile() as stderr:
            child = self._start(stderr)
            try:
                yield from self._read(child)
            except EngineDiedError as died:
                if not self._cancelled:
                    log.warning("%s: %s", died, _tail(stderr))
                raise
            finally:
                child.kill()
                child.wait()
                for pipe in (child.stdin, child.stdout):
                    if pipe is not None:
                        pipe.close()

    def _start(self, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._cancelled:
                raise EngineDiedError("the analysis was cancelled")
            self._child = child = subprocess.Popen(
                processes.isolated_python("-m", "perdure.ext.inspection.child"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
            return child

    def _read(self, child: subprocess.Popen[bytes]) -> Iterator[AnalysisProgress | AnalysisPage]:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(self._job.to_json().encode() + b"\n")
            child.stdin.flush()
        except OSError:
            raise self._died(child) from None
        for line in read_lines(child.stdout, _PAGE_BYTES, "the analysis"):
            if self._cancelled:
                break
            try:
                message = json.loads(line)
            except ValueError:
                # Its last line, cut by its end.
                break
            if "stage" in message:
                yield AnalysisProgress(message["stage"], message["done"], message["total"])
            elif "page" in message:
                yield AnalysisPage(message["page"], tuple(message["notes"]))
                return
            else:
                raise _error(message["error"], message["message"])
        raise self._died(child)

    def _died(self, child: subprocess.Popen[bytes]) -> EngineDiedError:
        code = child.wait()
        name = signal.Signals(-code).name if code < 0 else None
        how = f"was ended by {name}" if name else f"exited with code {code}"
        if self._cancelled:
            how = "was cancelled"
        elif name == "SIGKILL":
            how += ", which the system sends when memory runs out"
        return EngineDiedError(
            f"the analysis {how}; replies are not affected", signal=name, code=None if name else code
        )


def _error(name: str, message: str) -> PerdureError:
    """What the process raised. Some take more than a message."""
    kind = getattr(errors, name, EngineError)
    try:
        error: PerdureError = kind(message)
    except TypeError:
        error = EngineError(message)
    return error


def _tail(stderr: IO[bytes]) -> str:
    """What it said last."""
    stderr.seek(max(0, os.fstat(stderr.fileno()).st_size - _TAIL))
    return stderr.read(_TAIL).decode("utf-8", "replace").strip()
