"""TLS: the certificate that the server shows on its ports, and its renewal while it runs."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from perdure.errors import InvalidInputError

log = logging.getLogger("perdure.server")

LOOK = 30.0
"""Seconds between two looks whether the files were replaced."""


class Certificate:
    """A certificate with its key. A renewed one is shown to the connections that come next; where the files
    are wrong, the one that was read before stays."""

    def __init__(self, chain: Path, key: Path | None) -> None:
        """`key` is None where the key is in the file of the certificate."""
        self._chain, self._key = chain, key
        self.context = self._read()
        self._version = self._stamp()

    def renew(self) -> None:
        """Read the files again if they were replaced."""
        if (version := self._stamp()) == self._version:
            return
        self._version = version
        try:
            # By themselves first: half of a pair would spoil the one that is in use.
            self._read()
            self.context.load_cert_chain(self._chain, self._key)
        except (InvalidInputError, OSError) as error:
            log.error("the certificate is as it was: %s", error)
        else:
            log.info("the certificate was read again")

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        try:
            # An encrypted key would ask for its password on the terminal.
            context.load_cert_chain(self._chain, self._key, password=lambda: "")
        except (OSError, ValueError) as error:
            named = f"{self._chain}" if self._key is None else f"{self._chain} and {self._key}"
            raise InvalidInputError(
                f"{named} are no certificate with its key in PEM, without a password: {error}. --tls-cert "
                "has the certificate and those that signed it, --tls-key its key"
            ) from None
        return context

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """What tells that a file was replaced."""
        return tuple(map(_stamp_of, filter(None, (self._chain, self._key))))


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
