"""A guest: another process of the same user that uses the engine of a store."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from perdure.ext.workers.connection import Connection
from perdure.ext.workers.protocol import GREETING, Cancel, Leaving, Pulse, Welcome
from perdure.ext.workers.service import RequestService
from perdure.spi.runtime import Backend

log = logging.getLogger("perdure.store")

_PULSE = 0.5
"""Seconds after which a guest hears how far its prompts are."""
_IDLE_PULSE = 2.0
"""Seconds after which a guest hears that this process is there, while it asks nothing of it."""


class Guest:
    """One connection. Its requests are cancelled when it goes away."""

    def __init__(self, end: socket.socket, backend: Backend, settings: Mapping[str, Any]) -> None:
        self._connection = Connection(end)
        self._service = RequestService(self._connection, backend)
        self._settings = dict(settings)

    @property
    def busy(self) -> bool:
        return self._service.busy

    def announce_leaving(self) -> None:
        """Say that this process takes nothing more."""
        self._connection.send(Leaving())

    def cut(self, seconds: float) -> None:
        """End the connection, once what was said is sent, or after so many seconds."""
        self._connection.flush(seconds)
        self._connection.cut()

    def serve(self, guests: set[Guest], changing: threading.Lock, leaving: threading.Event) -> None:
        """Answer it until it goes away; it is among the `guests` meanwhile."""
        connection, service = self._connection, self._service
        with changing:
            if leaving.is_set():
                connection.close()
                return
            guests.add(self)
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
                # A request that came too late is sent again to the next process that has the store.
                if isinstance(message, Cancel) or not leaving.is_set():
                    service.handle(message)
        except EOFError:
            pass
        except Exception:
            log.exception("another process that uses the store is not understood")
        finally:
            with changing:
                guests.discard(self)
            service.close()
            connection.close()
