"""Media store: the folder `media/` of a store.

    media/rows/9c/9c00…       a medium: what it is, and its rows, by its digest (`media.Medium`)
    media/encoded/e2/e2ab…    {"pieces": [[1, 260], {"medium": "9c00…", "tokens": 64}, [259]]}, by a digest of
                              the namespace, the encoder's identity and the file's digest

Always holds: a file has its name once all of it is on the disk; what is returned was verified against its
name; no entry names rows that were not there when it was written. Rows can be made again, so they are deleted
where they take more than the budget, those first that were not used for the longest time. In a folder that
is encrypted, nothing here is plain. Files that sessions name are kept with these.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from perdure import CorruptStateError, InvalidInputError, StoreError, StoreKeyError, TooLargeError
from perdure.ext.images.media import EncodedFile, Medium, MediumDigest, digest_at, ids_of
from perdure.spi.base import make_folder, read_file, sync_folder, translate_os_errors, write_file
from perdure.spi.cache import PLAIN, Encryption, StateCodec, is_encrypted

FileDigest = NewType("FileDigest", bytes)
"""The SHA-256 of a file."""

BUDGET = 8 << 30
"""Bytes of rows that are kept, unless it is said."""
_LARGEST = 1 << 30
"""Bytes of the rows of one medium; a larger file is damaged."""
_ENTRY = 1 << 24
_FOLDER = "media"


@dataclass(frozen=True, slots=True)
class KnownFile:
    """What stands for an encoded file in a prompt, where its rows are kept."""

    tokens: list[int]
    media: tuple[MediumDigest, ...]


@dataclass(frozen=True, slots=True)
class MediaUsage:
    """What is kept of rows."""

    media: int
    row_bytes: int


class StoredMedia:
    """The media of a store, for what computes tokens."""

    def __init__(self, store: MediaStore) -> None:
        self._store = store
        self._last: Medium | None = None

    def medium(self, ids: NDArray[np.int32]) -> Medium:
        """The medium whose ids these begin with."""
        digest = digest_at(ids, 0)
        known = self._last
        medium = known if known is not None and known.digest == digest else self._store.medium(digest)
        if not np.array_equal(medium.ids[: len(ids)], ids[: len(medium)]):
            raise InvalidInputError("ids below zero stand for images, and these are of no whole one")
        # A long one is read in several steps.
        self._last = medium
        return medium


def open_store(folder: Path, encryption: Encryption | None) -> MediaStore:
    """The media of a store's folder, encrypted as its blocks are."""
    if encryption is None and is_encrypted(folder):
        raise StoreKeyError(
            f"the store {folder} is encrypted, and images of this process would be plain in it: send them "
            "to the process that has the store"
        )
    return MediaStore(folder, encryption.codec() if encryption is not None else PLAIN)


def stored_media(folder: Path, encryption: Encryption | None) -> StoredMedia:
    return StoredMedia(open_store(folder, encryption))


class MediaStore:
    """Rows of one store. Safe from any thread, and from several processes."""

    def __init__(self, store: Path, codec: StateCodec = PLAIN, *, budget: int = BUDGET) -> None:
        self._codec = codec
        self._budget = budget
        self._folder = store / _FOLDER
        self._lock = threading.Lock()
        self._row_bytes: int | None = None
        """Bytes of rows, counted when the first are written."""
        self._verified: dict[Path, tuple[int, int]] = {}
        """Rows that were read whole by this process, with their size and time."""

    # Files.

    def pack_file(self, digest: FileDigest, data: bytes) -> bytes:
        """A file as it is kept among sessions: encrypted where this folder is."""
        return b"".join(self._codec.encode(digest.hex(), [data]))

    def unpack_file(self, digest: FileDigest, packed: bytes) -> bytes | None:
        """A file as it was sent; None where it is damaged, or was kept under another key."""
        # It may be of a time before the folder was encrypted.
        for data in (self._codec.decode(digest.hex(), packed), packed):
            if data is not None and hashlib.sha256(data).digest() == digest:
                return data
        return None

    # Rows.

    def keep(self, namespace: str, identity: str, digest: FileDigest, encoded: EncodedFile) -> KnownFile:
        """Keep what an encoder made of a file. Rows first: an entry names none that are not there."""
        for medium in encoded.media:
            # Also where another namespace has the same: nobody learns of it by the time that this takes.
            path = self._path("rows", medium.digest)
            before = path.stat().st_size if path.exists() else 0
            self._write(path, medium.pack())
            self._add_rows(path, before)
        pieces = [
            {"medium": piece.digest.hex(), "tokens": len(piece)} if isinstance(piece, Medium) else list(piece)
            for piece in encoded.pieces
        ]
        self._write(self._entry(namespace, identity, digest), [json.dumps({"pieces": pieces}).encode()])
        return KnownFile(encoded.tokens, tuple(medium.digest for medium in encoded.media))

    def find(self, namespace: str, identity: str, digest: FileDigest) -> KnownFile | None:
        """What stands for a file; None where it was not encoded, or rows of it are missing or damaged."""
        data = self._read(self._entry(namespace, identity, digest), _ENTRY)
        if data is None:
            return None
        tokens: list[int] = []
        media: list[MediumDigest] = []
        try:
            for piece in json.loads(data)["pieces"]:
                if isinstance(piece, list):
                    tokens += piece
                    continue
                medium = MediumDigest(bytes.fromhex(piece["medium"]))
                if not self._is_whole(self._path("rows", medium), medium):
                    return None
                media.append(medium)
                tokens += ids_of(medium, piece["tokens"]).tolist()
        except (ValueError, KeyError, TypeError):
            return None
        return KnownFile(tokens, tuple(media))

    def medium(self, digest: MediumDigest) -> Medium:
        """A medium with its rows. One that is missing or damaged is an error; it is then gone."""
        path = self._path("rows", digest)
        data = self._read(path, _LARGEST)
        if data is None:
            raise CorruptStateError(
                "the rows of an image are not in the store any more; send the message again, and the image "
                "is encoded again"
            )
        try:
            medium = Medium.unpack(data, digest)
        except CorruptStateError:
            self._delete(path)
            raise
        with suppress(OSError):
            # Used now: others go first.
            os.utime(path)
        return medium

    def usage(self) -> MediaUsage:
        rows = list(self._sizes("rows"))
        return MediaUsage(len(rows), sum(size for _, size, _ in rows))

    def forget_rows(self) -> int:
        """Delete all rows, and what says which file gave them. How many media there were."""
        rows = [path for path, _, _ in self._sizes("rows")]
        for path in [*rows, *(path for path, _, _ in self._sizes("encoded"))]:
            self._delete(path)
        self._row_bytes = None
        return len(rows)

    # Inside.

    def _path(self, kind: str, digest: bytes) -> Path:
        name = self._codec.name(digest).hex()
        return self._folder / kind / name[:2] / name

    def _entry(self, namespace: str, identity: str, digest: FileDigest) -> Path:
        parts = [namespace.encode(), identity.encode(), digest]
        key = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return self._path("encoded", hashlib.sha256(key).digest())

    def _is_whole(self, path: Path, digest: MediumDigest) -> bool:
        """Whether rows are there. They are read once by a process, and again when the file has changed."""
        try:
            status = path.stat()
        except OSError:
            return False
        version = (status.st_size, status.st_ino)
        if self._verified.get(path) != version:
            try:
                self.medium(digest)
            except CorruptStateError:
                return False
            self._verified[path] = version
        return True

    def _read(self, path: Path, limit: int) -> bytes | None:
        with translate_os_errors(path):
            try:
                return self._codec.decode(path.name, read_file(path, limit))
            except (FileNotFoundError, IsADirectoryError, TooLargeError):
                return None

    def _write(self, path: Path, parts: Sequence[bytes]) -> None:
        make_folder(self._folder, ours=True)
        make_folder(path.parent)
        write_file(path, self._codec.encode(path.name, parts))
        for folder in (path.parent, path.parent.parent, self._folder):
            sync_folder(folder)

    def _delete(self, path: Path) -> None:
        self._verified.pop(path, None)
        with translate_os_errors(path), suppress(FileNotFoundError):
            path.unlink()

    def _sizes(self, kind: str) -> Iterator[tuple[Path, int, float]]:
        for path in (self._folder / kind).glob("??/*"):
            with suppress(OSError):
                status = path.stat()
                yield path, status.st_size, status.st_mtime

    def _add_rows(self, path: Path, before: int) -> None:
        """Count rows that were written, and delete others where they are more than the budget."""
        with self._lock:
            if self._row_bytes is None:
                self._row_bytes = sum(size for _, size, _ in self._sizes("rows"))
            else:
                self._row_bytes += path.stat().st_size - before
            if self._row_bytes <= self._budget:
                return
            # A tenth more than needed, so that this is not done for every image.
            goal = self._budget - self._budget // 10
            left = 0
            for other, size, _ in sorted(self._sizes("rows"), key=lambda each: -each[2]):
                left += size
                if left > goal and other != path:
                    with suppress(StoreError):
                        self._delete(other)
                        left -= size
            self._row_bytes = left
