"""Seal: texts that clients carry for us, and can neither read nor change."""

from __future__ import annotations

import base64
import hashlib
import hmac
import zlib

_TAG = 32


class Seal:
    """Seals texts for a namespace. The same text has the same seal; another namespace cannot open it.

    The tag is an HMAC of the namespace and the text, and also the nonce of the key stream that hides the text
    (a synthetic initialisation vector): nothing random is needed, and nothing repeats but what is equal.
    """

    def __init__(self, key: bytes, *, limit: int) -> None:
        self._tag_key = hashlib.sha256(b"perdure/seal/tag/1\0" + key).digest()
        self._text_key = hashlib.sha256(b"perdure/seal/text/1\0" + key).digest()
        self.limit = limit
        """Characters of a sealed text."""

    def close(self, text: str, namespace: str) -> str:
        packed = zlib.compress(text.encode("utf-8", "surrogatepass"), 1)
        tag = self._tag(packed, namespace)
        return base64.b64encode(tag + self._hidden(packed, tag)).decode("ascii")

    def open(self, sealed: str, namespace: str) -> str | None:
        """The text; None where this server did not seal it for that namespace."""
        if len(sealed) > self.limit * 2:
            return None
        try:
            found = base64.b64decode(sealed, validate=True)
        except ValueError:
            return None
        tag, hidden = found[:_TAG], found[_TAG:]
        packed = self._hidden(hidden, tag)
        if not hmac.compare_digest(tag, self._tag(packed, namespace)):
            return None
        return zlib.decompress(packed).decode("utf-8", "surrogatepass")

    def _tag(self, packed: bytes, namespace: str) -> bytes:
        name = namespace.encode()
        return hmac.digest(self._tag_key, len(name).to_bytes(4, "little") + name + packed, "sha256")

    def _hidden(self, packed: bytes, tag: bytes) -> bytes:
        """With the key stream over it: hides what is open, and opens what is hidden."""
        stream = hashlib.shake_256(self._text_key + tag).digest(len(packed))
        size = len(packed)
        return (int.from_bytes(packed, "little") ^ int.from_bytes(stream, "little")).to_bytes(size, "little")
