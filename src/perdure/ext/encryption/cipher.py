"""Cipher: names and bytes that only a key can make, or read."""

from __future__ import annotations

import hmac
import secrets

from perdure import StoreError

_NONCE = 12
CIPHER_BYTES = _NONCE + 16
"""What encrypting adds: a nonce and a tag."""


class Cipher:
    """AES-256-GCM, bound to names, and names by HMAC."""

    def __init__(self, key: bytes, use: bytes = b"shared") -> None:
        """What is encrypted for one `use` is nothing for another."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError as error:
            raise StoreError(f"encryption needs {error.name}: pip install 'perdure[encryption]'") from None

        self._names = hmac.digest(key, b"perdure/" + use + b"/names/1", "sha256")
        self._cipher = AESGCM(hmac.digest(key, b"perdure/" + use + b"/bytes/1", "sha256"))

    def name(self, what: bytes) -> bytes:
        return hmac.digest(self._names, what, "sha256")

    def encrypt(self, name: str, data: bytes, *, repeatable: bool = False) -> bytes:
        """`data` under a name. Where it is `repeatable`, the same bytes each time: for columns of keys."""
        # A nonce that is made of all that is encrypted comes twice only for the same.
        made = (
            self.name(b"nonce\0" + name.encode() + b"\0" + data)
            if repeatable
            else secrets.token_bytes(_NONCE)
        )
        nonce = made[:_NONCE]
        return nonce + self._cipher.encrypt(nonce, data, name.encode())

    def decrypt(self, name: str, data: bytes) -> bytes | None:
        """What was encrypted under that name; None where it was not, or was changed."""
        from cryptography.exceptions import InvalidTag

        view = memoryview(data)
        try:
            return self._cipher.decrypt(bytes(view[:_NONCE]), view[_NONCE:], name.encode())
        except (InvalidTag, ValueError):
            return None
