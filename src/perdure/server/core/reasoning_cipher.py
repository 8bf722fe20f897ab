"""Reasoning cipher: texts that clients carry for us, and can neither read nor change.

    {"type": "reasoning", "encrypted_content": "qL3v…", "summary": []}            Responses
    {"type": "thinking", "thinking": "", "signature": "qL3v…"}                     Messages

A client sends such a text back with its next request, and the model sees its own reasoning again.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import zlib

_TAG = 32
_WIDEST = 4
"""Bytes of a character."""


class ReasoningCipher:
    """Encrypts texts for a namespace. The same text is encrypted to the same one; another namespace cannot
    decrypt it.

    The tag is an HMAC of the namespace and the text, and also the nonce of the key stream that hides the text
    (a synthetic initialisation vector): nothing random is needed, and nothing repeats but what is equal.
    """

    def __init__(self, key: bytes, *, limit: int) -> None:
        self._tag_key = hashlib.sha256(b"perdure/seal/tag/1\0" + key).digest()
        self._text_key = hashlib.sha256(b"perdure/seal/text/1\0" + key).digest()
        self.limit = limit
        """Characters of an encrypted text."""

    def encrypt(self, text: str, namespace: str) -> str:
        packed = zlib.compress(text.encode("utf-8", "surrogatepass"), 1)
        tag = self._tag(packed, namespace)
        return base64.b64encode(tag + self._hidden(packed, tag)).decode("ascii")

    def decrypt(self, encrypted: str, namespace: str) -> str | None:
        """The text; None where this server did not encrypt it for that namespace."""
        if len(encrypted) > self.limit * 2:
            return None
        try:
            data = base64.b64decode(encrypted, validate=True)
        except ValueError:
            return None
        tag, hidden = data[:_TAG], data[_TAG:]
        packed = self._hidden(hidden, tag)
        if not hmac.compare_digest(tag, self._tag(packed, namespace)):
            return None
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(packed, _WIDEST * self.limit)
        return text.decode("utf-8", "surrogatepass") if unpacking.eof else None

    def _tag(self, packed: bytes, namespace: str) -> bytes:
        name = namespace.encode()
        return hmac.digest(self._tag_key, len(name).to_bytes(4, "little") + name + packed, "sha256")

    def _hidden(self, packed: bytes, tag: bytes) -> bytes:
        """With the key stream over it: encrypts what is plain, and decrypts what is not."""
        stream = hashlib.shake_256(self._text_key + tag).digest(len(packed))
        size = len(packed)
        return (int.from_bytes(packed, "little") ^ int.from_bytes(stream, "little")).to_bytes(size, "little")
