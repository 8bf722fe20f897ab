"""A TCP proxy between a test and a server: it passes bytes on, holds them back, or cuts connections."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Proxy:
    """Listens on a free port of this machine and passes everything on to another one."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._passing = threading.Event()
        self._passing.set()
        self.cut_at: tuple[bytes, bool] | None = None
        """Bytes of a client that cut its connection, and whether they are passed on before that."""
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def partition(self) -> None:
        """Hold every byte back, and let connections be made that nobody answers."""
        self._passing.clear()

    def heal(self) -> None:
        """Pass on again. What was held back comes late, as in a real network."""
        self._passing.set()

    def cut(self) -> None:
        """Close every connection."""
        for pair in self._pairs:
            for each in pair:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.heal()
        self._listening.close()
        self.cut()
        for pair in self._pairs:
            for each in pair:
                each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._passing.wait()
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            client.close()
            return
        self._pairs.append((client, server))
        threading.Thread(target=self._pass, args=[server, client, False], daemon=True).start()
        self._pass(client, server, True)

    def _pass(self, source: socket.socket, target: socket.socket, upwards: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._passing.wait()
                if upwards and self.cut_at is not None and self.cut_at[0] in data:
                    passed = self.cut_at[1]
                    self.cut_at = None
                    # The answer finds nobody.
                    client, server = source, target
                    client.shutdown(socket.SHUT_RDWR)
                    if passed:
                        server.sendall(data)
                    server.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
