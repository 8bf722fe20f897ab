"""The engine of a store, served to other processes of the same user that use that store."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from perdure import system
from perdure.backend import Backend
from perdure.store.owner import StoreOwner
from perdure.worker.connection import Connection
from perdure.worker.protocol import Cancel, Leaving, Pulse, Welcome
from perdure.worker.service import RequestService

log = logging.getLogger("perdure.store")

GREETING = ("perdure", version("perdure"))
"""What is sent first, in a form that every version reads: only equals go on from there."""
_GRACE = 20.0
"""Seconds for the replies of others to finish when this process leaves."""
_NAP = 0.1
_PULSE = 0.5
"""Seconds after which others hear how far their prompts are."""
_IDLE_PULSE = 2.0
"""Seconds after which others hear that this process is there, while they ask nothing of it."""


class Listener:
    """Serves a backend on a socket that only its owner may use.

    Always holds: a process of another user gets nothing; whoever goes away has his requests cancelled; once
    `close` has begun, nothing more is taken, and what is running has some time to finish.
    """

    def __init__(self, holder: StoreOwner, backend: Backend, settings: Mapping[str, Any]) -> None:
        self._backend = backend
        self._settings = dict(settings)
        self._leaving = threading.Event()
        self._changing = threading.Lock()
        self._services: dict[Connection, RequestService] = {}
        self._socket = _bound(holder.socket)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="perdure-listener", daemon=True)
        self._thread.start()

    def connect(self) -> Connection:
        """A connection from this very process."""
        here, there = socket.socketpair()
        self._start(there)
        return Connection(here)

    def close(self, grace: float = _GRACE) -> None:
        """Take nothing more, let what others wait for finish for a while, then let go of everybody."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        self._wake.send(b"!")
        self._thread.join()
        with self._changing:
            services = dict(self._services)
        for connection in services:
            connection.send(Leaving())
        end = time.monotonic() + grace
        try:
            while any(service.busy for service in services.values()) and time.monotonic() < end:
                time.sleep(_NAP)
        finally:
            for connection in services:
                connection.flush(_NAP)
                connection.cut()
            for each in (self._socket, self._wake, self._woken):
                if each is not None:
                    each.close()

    def _accept(self) -> None:
        while not self._leaving.is_set():
            ready, _, _ = select.select([each for each in (self._socket, self._woken) if each], [], [])
            if self._socket is None or self._socket not in ready:
                continue
            with suppress(OSError):
                end, _ = self._socket.accept()
                if system.is_own_peer(end):
                    self._start(end)
                else:
                    log.warning("a process of another user asked for the engine of the store: refused")
                    end.close()

    def _start(self, end: socket.socket) -> None:
        threading.Thread(
            target=self._serve, args=(Connection(end),), name="perdure-service", daemon=True
        ).start()

    def _serve(self, connection: Connection) -> None:
        service = RequestService(connection, self._backend)
        with self._changing:
            if self._leaving.is_set():
                connection.close()
                return
            self._services[connection] = service
        try:
            connection.send(GREETING)
            connection.send(Welcome(ready=service.ready(), settings=self._settings))
            due = time.monotonic() + _PULSE
            while True:
                try:
                    message = connection.receive(max(0.0, due - time.monotonic()))
                except TimeoutError:
                    message = None
                if time.monotonic() >= due:
                    connection.send(Pulse(0, service.progress()))
                    due = time.monotonic() + (_PULSE if service.busy else _IDLE_PULSE)
                if message is None:
                    continue
                # What came too late is asked again of whoever has the store next.
                if isinstance(message, Cancel) or not self._leaving.is_set():
                    service.handle(message)
        except EOFError:
            pass
        except Exception:
            log.exception("another process that uses the store is not understood")
        finally:
            with self._changing:
                self._services.pop(connection, None)
            service.close()
            connection.close()


def _bound(address: str) -> socket.socket | None:
    """A socket that listens there. Without one the store is used by this process alone."""
    if not address:
        return None
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            os.unlink(address)
        end.bind(address)
        # Whoever is faster than this is still asked who he is.
        os.chmod(address, 0o600)
        end.listen(64)
    except OSError as error:
        end.close()
        log.warning("%s cannot be listened on, so other programs cannot share the store: %s", address, error)
        return None
    return end
