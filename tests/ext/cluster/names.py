"""A name server for tests: one name with an address for each replica, as Docker's own has it."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

_A, _IN = 1, 1


class NameServer:
    """Answers every question for addresses with those that there are now, over UDP."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                asked, whom = self._socket.recvfrom(4096)
                self._socket.sendto(self._answer(asked), whom)

    def _answer(self, asked: bytes) -> bytes:
        end = asked.index(b"\0", 12) + 5
        question = asked[12:end]
        [kind] = struct.unpack_from(">H", question, len(question) - 4)
        records = [
            b"\xc0\x0c" + struct.pack(">HHIH", _A, _IN, 1, 4) + socket.inet_aton(address)
            for address in (self.addresses if kind == _A else ())
        ]
        head = asked[:2] + struct.pack(">HHHHH", 0x8180, 1, len(records), 0, 0)
        return head + question + b"".join(records)
