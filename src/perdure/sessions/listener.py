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
from typing import Any, Protocol

from perdure.backend import Backend
from perdure.events.background import BackgroundThread
from perdure.extension import optional_part
from perdure.store.owner import StoreOwner
from perdure.system import processes

log = logging.getLogger("perdure.store")

_GRACE = 20.0
"""Seconds for the replies of others to finish when this process leaves."""
_NAP = 0.1


class StoreGuest(Protocol):
    """A connection of another process. An extension has it: it opens one with the socket, the backend and the
    settings, in a thread that serves until the other side leaves."""

    @property
    def busy(self) -> bool: ...
    def announce_leaving(self) -> None: ...
    def cut(self, seconds: float) -> None: ...
    def serve(self, guests: set[Any], changing: threading.Lock, leaving: threading.Event) -> None: ...


class Listener:
    """Serves a backend on a socket that only its owner may use.

    Always holds: a process of another user gets nothing; a client that leaves has its requests cancelled;
    once `close` has begun, nothing more is taken, and what is running has some time to finish.
    """

    def __init__(self, holder: StoreOwner, backend: Backend, settings: Mapping[str, Any]) -> None:
        self._backend = backend
        self._settings = dict(settings)
        self._leaving = threading.Event()
        self._changing = threading.Lock()
        self._guests: set[StoreGuest] = set()
        self._socket = _bound(holder.socket)
        self._wake, self._woken = socket.socketpair()
        self._thread = BackgroundThread(self._accept, name="perdure-listener", restart=True)
        self._thread.start()

    def connect(self) -> socket.socket:
        """A connection from this very process."""
        here, there = socket.socketpair()
        self._start(there)
        return here

    def close(self, grace: float = _GRACE) -> None:
        """Take nothing more, let what others wait for finish for a while, then let go of everybody."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        self._wake.send(b"!")
        self._thread.join()
        with self._changing:
            guests = set(self._guests)
        for guest in guests:
            guest.announce_leaving()
        end = time.monotonic() + grace
        try:
            while any(guest.busy for guest in guests) and time.monotonic() < end:
                time.sleep(_NAP)
        finally:
            for guest in guests:
                guest.cut(_NAP)
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
                try:
                    own = processes.is_own_peer(end)
                except BaseException:
                    end.close()
                    raise
                if own:
                    self._start(end)
                else:
                    log.warning("a process of another user asked for the engine of the store: refused")
                    end.close()

    def _start(self, end: socket.socket) -> None:
        BackgroundThread(self._serve, end, name="perdure-service").start()

    def _serve(self, end: socket.socket) -> None:
        # Loaded when another process comes; most programs have a store for themselves.
        guest = optional_part("guests of a store")
        # Whatever happens here, the other process does not wait for an answer.
        with end:
            if guest is not None:
                opened: StoreGuest = guest(end, self._backend, self._settings)
                opened.serve(self._guests, self._changing, self._leaving)


def _bound(address: str) -> socket.socket | None:
    """A socket that listens there. Without one the store is used by this process alone."""
    if not address:
        return None
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            os.unlink(address)
        end.bind(address)
        # A client that connects before this line is still asked for its user.
        os.chmod(address, 0o600)
        end.listen(64)
    except OSError as error:
        end.close()
        log.warning("%s cannot be listened on, so other programs cannot share the store: %s", address, error)
        return None
    return end
