"""Saved state as bytes that describe themselves.

    magic 8 | version u32 | identity bytes u32 | tokens u64 | payload bytes u64 | checksum 16 | digest 32
    identity JSON | token ids i32 each | payload

All little-endian. The checksum (XXH3-128) is over every other byte, so nothing can change unnoticed;
the digest (SHA-256) is that of the identity.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from perdure.engine.parallel import joined
from perdure.errors import CorruptStateError, IncompatibleStateError
from perdure.identity import Identity

MAGIC = b"PERDURE\x00"
VERSION = 1
_HEAD = struct.Struct("<8sIIQQ16s32s")
CHECKSUM = slice(32, 48)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A point that a sequence can go back to: its tokens, and the part of the state that cannot be cut.

    Where the memory can be cut anywhere there is no such part, and going back is a truncation.
    """

    identity: bytes
    tokens: NDArray[np.int32]
    state: NDArray[np.uint8] | None

    def __post_init__(self) -> None:
        for part in (self.tokens, self.state):
            if part is not None:
                part.flags.writeable = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + (0 if self.state is None else self.state.nbytes)


@dataclass(frozen=True, slots=True)
class SavedState:
    """What `unpack` found, all of it verified."""

    tokens: NDArray[np.int32]
    payload: NDArray[np.uint8]


def pack(identity: Identity, tokens: NDArray[np.int32], payload: NDArray[np.uint8]) -> bytes:
    """The state of `tokens` as bytes that describe themselves."""
    words = identity.to_json()
    sizes = (len(words), len(tokens), payload.nbytes)
    head = _HEAD.pack(MAGIC, VERSION, *sizes, bytes(16), identity.digest)
    head += words + tokens.astype("<i4").tobytes()

    def with_checksum() -> bytes:
        digest = xxhash.xxh3_128(head[: CHECKSUM.start])
        digest.update(head[CHECKSUM.stop :])
        digest.update(payload.data)
        return head[: CHECKSUM.start] + digest.digest() + head[CHECKSUM.stop :]

    return joined(with_checksum, len(head), payload)


def unpack(data: bytes | bytearray | memoryview, identity_of: Callable[[int], Identity]) -> SavedState:
    """The verified contents of `data`, which must be of the identity that so many tokens have here."""
    try:
        view = memoryview(data).cast("B")
    except (TypeError, ValueError) as error:
        raise CorruptStateError(f"saved state is bytes, got {type(data).__name__}") from error
    if len(view) < _HEAD.size or view[:8] != MAGIC:
        raise CorruptStateError(f"not a saved state: {len(view)} bytes without its mark at the start")
    _, version, n_words, n_tokens, n_payload, checksum, digest = _HEAD.unpack_from(view)
    if version != VERSION:
        raise IncompatibleStateError(
            f"saved state of format {version}; this perdure reads format {VERSION}", field="format"
        )
    expected = _HEAD.size + n_words + 4 * n_tokens + n_payload
    if len(view) != expected:
        raise CorruptStateError(f"saved state has {len(view)} bytes, its header says {expected}")
    if _checksum(view) != checksum:
        raise CorruptStateError("saved state is damaged: its checksum does not match")
    at = _HEAD.size + n_words
    identity = identity_of(n_tokens)
    if digest != identity.digest:
        raise _foreign(bytes(view[_HEAD.size : at]), identity)
    head = at + 4 * n_tokens
    tokens = np.frombuffer(view[at:head], dtype="<i4").astype(np.int32)
    return SavedState(tokens, np.frombuffer(view[head:], dtype=np.uint8))


def _foreign(words: bytes, identity: Identity) -> IncompatibleStateError:
    try:
        theirs = Identity.from_json(words)
    except (ValueError, TypeError):
        return IncompatibleStateError("saved state of an unknown identity")
    field = identity.difference(theirs) or "identity"
    return IncompatibleStateError(
        f"saved state was made with another {field}: it has {getattr(theirs, field, '?')!r}, "
        f"this context {getattr(identity, field, '?')!r}. Recompute it from the tokens",
        field=field,
    )


def _checksum(view: memoryview) -> bytes:
    digest = xxhash.xxh3_128()
    digest.update(view[: CHECKSUM.start])
    digest.update(view[CHECKSUM.stop :])
    return digest.digest()
