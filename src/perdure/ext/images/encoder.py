"""The encoder: a process that is started when a file comes, and ended when none has come for a time.

Always holds: a file that makes the process crash, hang or take too long costs that process and its own call,
which gets a typed error; the next call has a new process. One file is encoded at a time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from perdure import (
    ClosedError,
    EngineDiedError,
    EngineError,
    InvalidInputError,
    PerdureError,
    TooLargeError,
)
from perdure.ext.images import fetched
from perdure.ext.images.library import find_library
from perdure.ext.images.media import MOST_LOW, EncodedFile, Medium, MediumKind, Piece
from perdure.ext.images.wire import receive, send
from perdure.ext.workers import deadly_files
from perdure.spi.base import Closing, content_digest, errors, processes, system
from perdure.spi.chat import Image
from perdure.spi.runtime import BackgroundTimer

log = logging.getLogger("perdure.ext.images")

MOST_BYTES = 64 << 20
"""Of one file."""
_IDLE = 300.0
"""Seconds without a file after which the process ends."""
_TAIL = 2048
_PLAIN_IMAGE = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a4944415478"
    "da6368000000820081da45083b0000000049454e44ae426082"
)
"""A PNG of one grey pixel, to see whether a projector encodes anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How many seconds the process may take."""

    start: float = 300.0
    decode: float = 60.0
    """To decode a file into pixels or samples."""
    encode: float = 900.0
    """To encode them: a tower of 93M parameters takes 8 seconds of one core for each slice of an image."""


class Encoder(Closing):
    """Encodes files for one model with one projector. Safe from any thread."""

    def __init__(
        self,
        model: Path,
        projector: Path,
        *,
        engine: Path | None = None,
        gpus: Sequence[str] | None = None,
        threads: int | None = None,
        idle: float = _IDLE,
        patience: Patience | None = None,
    ) -> None:
        """`engine` is the folder of the engine's library, which may have libmtmd too, and `gpus` are those
        that this library uses; None: not known."""
        if fetched.module_folder("pillow") is None:
            raise fetched.missing("Pillow")
        self.projector = projector
        self._model = model
        self._library = find_library(engine)
        self._gpus = gpus if self._library.parent == engine else None
        self._threads = threads or system.usable_cores()
        self._idle = idle
        self._patience = patience or Patience()
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False
        self.encoded = 0
        """Files that were encoded."""
        self._loaded = deadly_files.LoadedTogether(
            (projector, model), build=lambda: content_digest(self._library)
        )
        self._works = self._suspected = False
        """Whether anything was ever encoded; whether a process has crashed before that."""

    @cached_property
    def identity(self) -> str:
        """What rows depend on besides the file: the library, the projector, the model's file, what
        decodes images, and the GPUs, as a digest in hex. Threads are not among it: they change no bit."""
        parts = [
            *(content_digest(path) for path in (self._library, self.projector, self._model)),
            f"Pillow {fetched.pillow_version()}, RGB on white, oriented",
            *(self._gpus or ()),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def identity_for(self, image: Image) -> str:
        """What rows of this image depend on besides its file."""
        return f"{self.identity}, at most {MOST_LOW} a side" if image.low else self.identity

    @property
    def pid(self) -> int | None:
        """Of the process; None where there is none now."""
        child = self._child
        return None if child is None or not child.is_running else child.pid

    def encode(self, data: bytes, kind: MediumKind = "image", *, low: bool = False) -> EncodedFile:
        """What stands for a file in a prompt, of an image that is scaled down before with `low`.
        InvalidInputError, TooLargeError: the file's fault."""
        _check_size(data)
        with self._lock, self._running() as child:
            child.ask({"encode": kind, "low": low}, data, self._patience.decode, "decode")
            message, rows = child.answer(self._patience.encode, "encode")
            self.encoded += 1
            self._works = True
            return EncodedFile(tuple(_pieces(message["pieces"], rows)))

    def count(self, data: bytes, kind: MediumKind = "image", *, low: bool = False) -> int:
        """How many tokens a file will be: an image by its header alone."""
        _check_size(data)
        with self._lock, self._running() as child:
            message, _ = child.ask({"count": kind, "low": low}, data, self._patience.decode, "decode")
            return int(message["tokens"])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.end()
                self._child = None

    @contextmanager
    def _running(self) -> Iterator[_Child]:
        """The process, started if it is not there. It is ended by any failure but a refusal."""
        if self._closed:
            raise ClosedError("this encoder is closed")
        if self._child is None or not self._child.wake():
            self._child = self._start()
        try:
            yield self._child
        except BaseException as error:
            if not isinstance(error, PerdureError) or isinstance(error, EngineDiedError):
                self._suspected = self._child.crashed and not self._works
                self._child.end()
                self._child = None
                if self._suspected:
                    # The file, or the projector: a file at which this one encoder died is not tried again.
                    self._child = self._start()
            raise

    def _start(self) -> _Child:
        """A process that has loaded the projector. One that crashes is followed by a second, which shows
        whether the projector encodes anything; where that crashes too, it is remembered."""
        while True:
            self._loaded.check()
            child = _Child()
            try:
                child.load(self._setup, self._patience.start)
                if self._suspected:
                    child.try_image(self._patience)
                    self._works, self._suspected = True, False
                return child
            except BaseException as error:
                child.end()
                if not child.crashed or self._works:
                    raise
                if self._suspected:
                    self._suspected = False
                    self._loaded.remember(str(getattr(error, "signal", None)))
                    self._loaded.check()
                    raise
                self._suspected = True

    @property
    def _setup(self) -> dict[str, Any]:
        return {
            "library": str(self._library),
            "packages": str(fetched.packages() or ""),
            "projector": str(self.projector),
            "model": str(self._model),
            "threads": self._threads,
            "gpu": self._gpus is None or bool(self._gpus),
            "idle": self._idle,
        }


class _Child:
    """One process, from its start to its end."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self._killed_for = ""
        self.crashed = False
        """Whether it ended by a crash in native code."""
        self._process = subprocess.Popen(
            processes.isolated_python("-m", "perdure.ext.images.child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def load(self, setup: dict[str, Any], patience: float) -> None:
        self.ask(setup, b"", patience, "load the projector")

    def try_image(self, patience: Patience) -> None:
        """Encode a plain image, whatever comes of it: the process may die of it."""
        try:
            self.ask({"encode": "image", "low": False}, _PLAIN_IMAGE, patience.decode, "decode")
            self.answer(patience.encode, "encode")
        except EngineDiedError:
            raise
        except PerdureError as error:
            log.info("a plain image is not encoded: %s", error)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def wake(self) -> bool:
        """Whether it is there. It may end by itself at any time while it waits for a file, but not once this
        was answered."""
        try:
            self.ask({}, b"", 10.0, "answer")
        except EngineDiedError:
            self.end()
            return False
        return True

    def ask(self, message: dict[str, Any], data: bytes, patience: float, what: str) -> tuple[Any, bytes]:
        assert self._process.stdin is not None
        with self._limited(patience, what):
            try:
                send(self._process.stdin, message, data)
            except OSError:
                raise self._died() from None
            return self._receive()

    def answer(self, patience: float, what: str) -> tuple[Any, bytes]:
        """A further answer to what was asked."""
        with self._limited(patience, what):
            return self._receive()

    def _receive(self) -> tuple[Any, bytes]:
        assert self._process.stdout is not None
        try:
            message, data = receive(self._process.stdout)
        except (EOFError, ValueError):
            raise self._died() from None
        if "error" in message:
            raise _error(message)
        return message, data

    @contextmanager
    def _limited(self, seconds: float, what: str) -> Iterator[None]:
        def end() -> None:
            self._killed_for = f"took more than {seconds:.0f} seconds to {what}"
            self._process.kill()

        timer = BackgroundTimer(seconds, end, name="perdure-encoder")
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def end(self) -> None:
        """End it, and give everything back."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._log.close()

    def _died(self) -> EngineDiedError:
        self._process.kill() if self._killed_for else None
        code = self._process.wait()
        name = signal.Signals(-code).name if code < 0 else None
        how = f"was ended by {name}" if name else f"exited with code {code}"
        if self._killed_for:
            how = self._killed_for
        elif name == "SIGKILL":
            how += ", which the system sends when memory runs out"
        said = _tail(self._log)
        self.crashed = not self._killed_for and deadly_files.is_crash(name, said)
        if said:
            log.warning("the encoder of images %s: %s", how, said)
        return EngineDiedError(
            f"the encoder of images {how}; no reply is affected but the one that needs this file",
            signal=name,
            code=None if name else code,
        )


def _pieces(described: list[Any], data: bytes) -> Iterator[Piece]:
    at = 0
    for each in described:
        if isinstance(each, list):
            yield each
            continue
        count, width = each["tokens"], each["width"]
        rows = np.frombuffer(data, "<f4", count * width, at).reshape(count, width)
        at += rows.nbytes
        if not np.isfinite(rows).all():
            raise EngineError("the encoder gave rows with numbers that are none; the file is not used")
        yield Medium(
            kind=each["kind"], rows=rows, n_pos=each["n_pos"], grid=tuple(each["grid"]), causal=each["causal"]
        )


def _check_size(data: bytes) -> None:
    if not data:
        raise InvalidInputError("the file is empty")
    if len(data) > MOST_BYTES:
        raise TooLargeError(
            f"the file has {len(data)} bytes, and {MOST_BYTES} are read of one; make it smaller",
            limit=MOST_BYTES,
        )


def _error(message: dict[str, Any]) -> PerdureError:
    kind = getattr(errors, message["error"], EngineError)
    if kind is TooLargeError:
        return TooLargeError(message["message"], limit=message["limit"])
    try:
        error: PerdureError = kind(message["message"])
    except TypeError:
        error = EngineError(message["message"])
    return error


def _tail(file: IO[bytes]) -> str:
    """What it said last."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
    return file.read(_TAIL).decode("utf-8", "replace").strip()
