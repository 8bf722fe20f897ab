"""What an encoded file is: text tokens and media, one after the other.

    [1, 260, 271]    Medium(rows 16 × 64, 16 positions)    [259]

A medium is named by a digest of all that a decoder gets of it, 224 bits behind 16 that say how many positions
it takes up where these have two dimensions. In a ledger it stands as ids below zero, 30 bits each: the first
eight are the digest, the others follow from it. So what computes tokens finds the rows by the ids alone, and
two media have the same ids only if they have the same rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NewType

import numpy as np
from numpy.typing import NDArray

from perdure import CorruptStateError, InvalidInputError
from perdure.spi.cache import FIRST_ID, NEXT_ID
from perdure.spi.engine import Floats

MediumDigest = NewType("MediumDigest", bytes)
"""30 bytes."""
MediumKind = Literal["image", "audio"]

MOST_LOW = 512
"""Pixels a side of an image whose detail is low."""
LEAST = 8
"""Tokens of the smallest medium: its ids hold its whole digest."""
_MOST_POSITIONS = 1 << 16
_BITS = 30
_DIGEST = LEAST * _BITS // 8
_MAGIC = b"PDMEDIA1"


@dataclass(frozen=True, eq=False)
class Medium:
    """What a decoder gets of an image, a slice of one, or a sound.

    Always holds: `digest` follows from all other fields. `rows` has a row for each token.
    """

    kind: MediumKind
    rows: Floats
    n_pos: int
    """Positions that it takes up: fewer than tokens, where positions have two dimensions."""
    grid: tuple[int, int] = (0, 0)
    """Tokens across and down, where positions have two dimensions; else zeros."""
    causal: bool = True
    """Whether its tokens see only those before them. If not, all of them are read in one step."""

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or len(self.rows) < LEAST:
            raise InvalidInputError(
                f"a medium has at least {LEAST} tokens, got rows of shape {self.rows.shape}: send a larger"
                " one"
            )
        if self.grid[0] and not 0 < self.n_pos < _MOST_POSITIONS:
            raise InvalidInputError(
                f"an image takes up to {_MOST_POSITIONS - 1} positions, and this one {self.n_pos}: send a "
                "smaller one"
            )

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def digest(self) -> MediumDigest:
        name = hashlib.sha256(self._head)
        name.update(np.ascontiguousarray(self.rows, "<f4").data)
        return self._named(name.digest())

    def _named(self, name: bytes) -> MediumDigest:
        """The digest of a medium whose content has this SHA-256."""
        positions = self.n_pos if self.grid[0] else 0
        return MediumDigest((positions.to_bytes(2, "big") + name)[:_DIGEST])

    @cached_property
    def ids(self) -> NDArray[np.int32]:
        """What stands for its tokens in a ledger."""
        return ids_of(self.digest, len(self))

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    @property
    def _head(self) -> bytes:
        fields = [self.kind, *self.rows.shape, self.n_pos, *self.grid, self.causal]
        return _MAGIC + json.dumps(fields).encode() + b"\n"

    def pack(self) -> list[bytes]:
        """Its file. The digest is its checksum."""
        return [self._head, np.ascontiguousarray(self.rows, "<f4").tobytes()]

    @classmethod
    def unpack(cls, data: bytes, digest: MediumDigest) -> Medium:
        """The medium of a file, if it is the one that the digest says."""
        head, _, body = data.partition(b"\n")
        name = hashlib.sha256(data).digest()
        if not head.startswith(_MAGIC) or not digest.endswith(name[: _DIGEST - 2]):
            raise CorruptStateError("the rows of a medium are damaged; encode the file again")
        kind, count, width, n_pos, across, down, causal = json.loads(head[len(_MAGIC) :])
        rows = np.frombuffer(body, "<f4").reshape(count, width)
        medium = cls(kind=kind, rows=rows, n_pos=n_pos, grid=(across, down), causal=causal)
        if medium._named(name) != digest:
            raise CorruptStateError("the rows of a medium are damaged; encode the file again")
        return medium


Piece = Sequence[int] | Medium
"""Tokens of text, or a medium."""


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """What stands for a file in a prompt."""

    pieces: tuple[Piece, ...]

    @property
    def media(self) -> Iterator[Medium]:
        return (piece for piece in self.pieces if isinstance(piece, Medium))

    @property
    def tokens(self) -> list[int]:
        """Its part of a prompt."""
        ids: list[int] = []
        for piece in self.pieces:
            ids += piece.ids.tolist() if isinstance(piece, Medium) else piece
        return ids


def ids_of(digest: MediumDigest, count: int) -> NDArray[np.int32]:
    """The `count` ids of a medium of this digest."""
    number = int.from_bytes(digest, "big")
    mask = (1 << _BITS) - 1
    ids = [NEXT_ID | number >> _BITS * (LEAST - 1 - at) & mask for at in range(LEAST)]
    more = b"".join(
        hashlib.sha256(digest + at.to_bytes(4, "big")).digest() for at in range(-(-(count - LEAST) // 8))
    )
    others = np.frombuffer(more, "<u4")[: count - LEAST] | np.uint32(NEXT_ID)
    ids[0] &= ~(NEXT_ID ^ FIRST_ID)
    return np.concatenate([np.array(ids, np.uint32), others]).view(np.int32)


def digest_at(tokens: NDArray[np.int32], start: int) -> MediumDigest:
    """The digest of the medium whose ids begin at `start`."""
    ids = tokens[start : start + LEAST].view(np.uint32).tolist()
    if len(ids) < LEAST or ids[0] & NEXT_ID != FIRST_ID or any(each & NEXT_ID != NEXT_ID for each in ids[1:]):
        raise InvalidInputError("ids below zero stand for images; these are those of none")
    number = 0
    for each in ids:
        number = number << _BITS | each & ((1 << _BITS) - 1)
    return MediumDigest(number.to_bytes(_DIGEST, "big"))
