"""The process with the engine: `python -m perdure.ext.workers.child FD`.

It talks to its parent over that socket alone, and does not outlive it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading

from perdure import ClosedError, PerdureError, Stream
from perdure.ext.workers.connection import Connection
from perdure.ext.workers.protocol import Close, Failed, Line, Pulse, Setup
from perdure.ext.workers.service import RequestService, portable
from perdure.spi.base import imported, processes, system
from perdure.spi.engine import registry
from perdure.spi.runtime import FAILURES, BackgroundThread, LocalBackend, Request, one_request

_FLUSH = 10.0
_ENGINE_GONE = 70


class Child:
    """Serves one parent until it says so, or is gone."""

    def __init__(self, connection: Connection, backend: LocalBackend, *, pulse: float) -> None:
        self._connection = connection
        self._backend = backend
        self._pulse_seconds = pulse
        self._service = RequestService(connection, backend, self._check_engine)
        self._closing = threading.Event()

    def serve(self) -> None:
        """Until the parent says close. EOFError where it is gone."""
        self._connection.send(self._service.ready())
        BackgroundThread(self._pulse, name="perdure-pulse", restart=True).start()
        while not isinstance(message := self._connection.receive(), Close):
            self._service.handle(message)
        self._closing.set()
        self._backend.close()

    def _pulse(self) -> None:
        """Go through the engine thread now and then: it gets round between two steps only."""
        rounds = 0
        while not self._closing.wait(self._pulse_seconds):
            try:
                self._backend.engine_loop.call(lambda: None)
            except ClosedError as error:
                self._check_engine(error)
                return
            rounds += 1
            self._connection.send(Pulse(rounds, self._service.progress(), dict(FAILURES)))

    def _check_engine(self, error: BaseException) -> None:
        """Only a defect of ours ends the engine thread, and then nothing works here: a new process has a
        new one, and is asked again what was not answered."""
        if isinstance(error, ClosedError) and not self._closing.is_set():
            self._connection.flush(_FLUSH)
            os._exit(_ENGINE_GONE)


class LogToParent(logging.Handler):
    """Sends log lines to the parent's log."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            self._connection.send(Line(record.name, record.levelno, record.getMessage()))


def main(fd: int) -> None:
    # Ctrl-C, a plain kill and a hang-up of the whole group are for the parent, which says what is to be done
    # about it: replies are finished first, or keys are read again.
    for each in (signal.SIGINT, *processes.ending_signals()):
        signal.signal(each, signal.SIG_IGN)
    processes.die_with_parent()
    processes.leave_no_core()
    # An abort is to end the process at once, not to call up a debugger first.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    connection = Connection(socket.socket(fileno=fd))
    with contextlib.suppress(EOFError):
        setup: Setup = connection.receive()
        _log_to(connection, setup.log_level)
        try:
            sys.path[:] = setup.paths
            backend = _build(setup)
        except BaseException as error:
            connection.send(Failed(portable(error)))
            connection.flush(_FLUSH)
            return
        system.freeze_memory()
        Child(connection, backend, pulse=setup.pulse).serve()
        connection.flush(_FLUSH)
        return
    # The parent is gone. What of the engine could be put in order is of use to nobody.
    os._exit(0)


def _build(setup: Setup) -> LocalBackend:
    engine: registry.Engine = imported(setup.engine)
    model = engine.open(setup.model, cells=registry.cells(setup.config), **setup.config.loading)
    try:
        backend = LocalBackend(model, setup.config, storage=setup.storage, own_model=True)
    except BaseException:
        model.close()
        raise
    if setup.tries_step:
        _try_step(backend)
    return backend


def _try_step(backend: LocalBackend) -> None:
    """Compute one token, whatever comes of it: this process may die of it."""
    request = Request(prompt=backend.model.tokenize("a")[:1] or [0], max_tokens=1)
    with contextlib.suppress(PerdureError), Stream(one_request(request), backend.submit) as stream:
        stream.reply()


def _log_to(connection: Connection, level: int) -> None:
    root = logging.getLogger("perdure")
    root.setLevel(level)
    root.propagate = False
    root.addHandler(LogToParent(connection))


if __name__ == "__main__":
    main(int(sys.argv[1]))
