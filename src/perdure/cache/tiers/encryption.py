"""Encryption at rest: names and bytes of blocks that only a key can make, or read.

A folder whose blocks are encrypted says so in a file, which has no secret in it:

    encrypted.json   {"key": "/etc/perdure/disk.key", "check": "…64 hex digits…"}

`key` is where the key is, or "cluster" for the one that is in the database of the sessions; `check` tells
whether a key is the right one. In such a folder

    blocks/NA/NAME       nonce 12 | AES-256-GCM of the block's file, bound to NAME
    index.sqlite         names for ids, and tokens, namespaces and labels encrypted, bound to their names

where NAME is made of the block's id by the key: who has the disk can neither read nor guess what is in it.
"""

from __future__ import annotations

import hmac
import itertools
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure.atomic import sync_folder, translate_os_errors, write_file
from perdure.cache.block import BlockId, BlockMeta, block_id_of
from perdure.cache.prefix_search import SortedKeys, key_of
from perdure.errors import InvalidInputError, StoreError, StoreKeyError

MARK = "encrypted.json"
CLUSTER = "cluster"
"""What stands for the key of the sessions' database."""
KEY_BYTES = 32
_NONCE = 12
SEAL_BYTES = _NONCE + 16
"""What sealing adds: a nonce and a tag."""


class Seal:
    """Names and bytes that only who has the key can make, or read."""

    def __init__(self, key: bytes, use: bytes = b"shared") -> None:
        """`use` tells what is sealed: what is sealed for one use is nothing for another."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError as error:
            raise StoreError(f"encryption needs {error.name}: pip install 'perdure[encryption]'") from None

        self._names = hmac.digest(key, b"perdure/" + use + b"/names/1", "sha256")
        self._cipher = AESGCM(hmac.digest(key, b"perdure/" + use + b"/bytes/1", "sha256"))

    def name(self, what: bytes) -> str:
        return self.name_bytes(what).hex()

    def name_bytes(self, what: bytes) -> bytes:
        return hmac.digest(self._names, what, "sha256")

    def close(self, name: str, data: bytes) -> bytes:
        return self._closed(secrets.token_bytes(_NONCE), name, data)

    def close_alike(self, name: str, data: bytes) -> bytes:
        """The same bytes whenever the same is sealed under a name: what has a place in a table of keys."""
        # A nonce that is made of all that is sealed comes twice only for the same.
        return self._closed(self.name_bytes(b"nonce\0" + name.encode() + b"\0" + data)[:_NONCE], name, data)

    def _closed(self, nonce: bytes, name: str, data: bytes) -> bytes:
        return nonce + self._cipher.encrypt(nonce, data, name.encode())

    def open(self, name: str, data: bytes) -> bytes | None:
        """What was sealed under that name; None where it was not, or was changed."""
        from cryptography.exceptions import InvalidTag

        view = memoryview(data)
        try:
            return self._cipher.decrypt(bytes(view[:_NONCE]), view[_NONCE:], name.encode())
        except (InvalidTag, ValueError):
            return None


# Keys.


@dataclass(frozen=True, slots=True)
class Encryption:
    """A key for the blocks of a disk, and where it is."""

    key: bytes = field(repr=False)
    origin: str
    """The path of its file, or `CLUSTER`."""

    def seal(self) -> Seal:
        return Seal(self.key, b"disk")


def read_key(path: Path) -> bytes:
    """The key in a file: 32 bytes, or 64 hex digits."""
    try:
        with path.open("rb") as file:
            data = file.read(4 * KEY_BYTES)
    except OSError as error:
        raise StoreKeyError(
            f"the key {path} cannot be read ({error.strerror}): bring it back, or make a new one with "
            f"`openssl rand -hex 32 > {path}`, which reads nothing that was encrypted before"
        ) from None
    if len(data) == KEY_BYTES:
        return data
    try:
        key = bytes.fromhex(data.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise StoreKeyError(
            f"{path} holds no key: {KEY_BYTES} bytes or {2 * KEY_BYTES} hex digits are wanted, as "
            "`openssl rand -hex 32` writes them"
        )
    return key


def choose_encryption(
    store: Path, chosen: str | None, folders: list[Path], cluster: Callable[[], bytes]
) -> Encryption | None:
    """How the blocks of a store are encrypted: as is asked for, else as they are already. `folders` are those
    that have blocks; `cluster` finds the key of the sessions' database."""
    if chosen is None:
        marks = [mark for folder in [store, *folders] if (mark := read_mark(folder)) is not None]
        if not marks:
            return None
        chosen = str(marks[0].get("key"))
    if chosen == CLUSTER:
        return Encryption(cluster(), CLUSTER)
    path = Path(chosen).expanduser().absolute()
    if path.resolve().is_relative_to(store.resolve()):
        raise InvalidInputError(
            f"the key {path} lies in the store that it encrypts: whoever has the one has the other. Move it"
        )
    return Encryption(read_key(path), str(path))


# Folders that are encrypted.


def read_mark(folder: Path) -> dict[str, Any] | None:
    """What a folder says of its encryption; None where its blocks are plain."""
    path = folder / MARK
    with translate_os_errors(path):
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        mark = json.loads(data)
    except ValueError:
        mark = None
    if not isinstance(mark, dict) or not isinstance(mark.get("check"), str):
        raise StoreKeyError(
            f"{path} is damaged: it must say which key encrypts the blocks beside it. Bring it back, "
            f"or delete {folder / 'blocks'} and {folder / 'index.sqlite'} with it"
        )
    return mark


def write_mark(folder: Path, encryption: Encryption, seal: Seal, *, whole: bool) -> None:
    """Say that a folder is encrypted; not `whole` while some of it may still be plain."""
    mark = {"key": encryption.origin, "check": _check(seal)} | ({} if whole else {"plain_left": True})
    write_file(folder / MARK, [json.dumps(mark).encode()])
    sync_folder(folder)


def check_mark(folder: Path, mark: dict[str, Any], encryption: Encryption | None) -> Seal:
    """The seal of an encrypted folder; `StoreKeyError` without its key, or with another."""
    where = mark.get("key")
    if encryption is None:
        raise StoreKeyError(
            f"the blocks in {folder} are encrypted, and no key was given: theirs is {where}. "
            "`perdure cache clear --all` deletes them without it"
        )
    seal = encryption.seal()
    if not hmac.compare_digest(_check(seal).encode(), mark["check"].encode()):
        raise StoreKeyError(
            f"the blocks in {folder} are encrypted with another key than {encryption.origin}: "
            f"theirs was {where}. Give that one; `perdure cache clear --all` deletes them without it"
        )
    return seal


def _check(seal: Seal) -> str:
    return seal.name(b"check")


# Rows of an index.


class SealedRows:
    """Rows of an index that only the key can read: a `RowFormat` (`block_index.py`)."""

    ordered = False

    def __init__(self, seal: Seal) -> None:
        self._seal = seal

    def name(self, block: bytes) -> bytes:
        return self._seal.name_bytes(block)

    def pack(self, block: bytes, parent: bytes, tokens: bytes) -> bytes:
        return self._seal.close_alike(self._seal.name(block), parent + tokens)

    def unpack(self, name: bytes, parent: bytes, packed: bytes) -> tuple[BlockId, BlockId, bytes] | None:
        data = self._seal.open(name.hex(), packed)
        if data is None or len(data) < 32 or len(data) % 4:
            return None
        block = block_id_of(data[:32], data[32:])
        # Its columns, too: a row of which one was changed leads astray.
        if self.name(block) != name or self.name(data[:32]) != parent:
            return None
        return block, BlockId(data[:32]), data[32:]

    def prefix(self, root: bytes, tokens: bytes) -> tuple[bytes, bytes]:
        name = self._seal.name_bytes(b"prefix\0" + root + tokens)
        return name, self._seal.close_alike(name.hex(), root + tokens)

    def open_prefix(self, name: bytes, packed: bytes) -> tuple[bytes, bytes] | None:
        data = self._seal.open(name.hex(), packed)
        return None if data is None or len(data) < 32 or len(data) % 4 else (data[:32], data[32:])

    def text(self, text: str) -> str:
        return self._seal.close_alike("text", text.encode()).hex()

    def open_text(self, packed: str) -> str | None:
        try:
            data = self._seal.open("text", bytes.fromhex(packed))
        except ValueError:
            return None
        return None if data is None else data.decode()


class KnownChildren:
    """What follows blocks, in the order of its tokens, where the rows of a table are in none: what follows a
    block is read once, and then changes with the table.

    Always holds: what is known of a block is what the table has, unless a transaction is going on; a child
    that is there and not known costs a hit, and never gives a wrong one.
    """

    def __init__(self, most: int) -> None:
        """`most` children are remembered."""
        self._most = most
        self._lock = threading.Lock()
        self._known: OrderedDict[BlockId, SortedKeys[BlockMeta]] = OrderedDict()
        self._places: dict[BlockId, tuple[BlockId, bytes]] = {}
        """By child: its parent and its key."""
        self._changes = 0
        """Odd while a transaction goes on."""

    def of(
        self, parent: BlockId, start: bytes, back: bool, read: Callable[[BlockId], Iterable[BlockMeta]]
    ) -> Iterator[BlockMeta]:
        """The children of `parent` from `start` on, or back from it; `read` reads all of them."""
        with self._lock:
            children, before = self._known.get(parent), self._changes
            if children is not None:
                self._known.move_to_end(parent)
        if children is None:
            children = SortedKeys()
            for meta in read(parent):
                children.add(key_of(meta.tokens), meta)
            self._learn(parent, children, before)
        limit, last = 1, None
        while True:
            with self._lock:
                walk = (meta for meta in children.walk(start, back=back) if meta.id != last)
                metas = list(itertools.islice(walk, limit))
            yield from metas
            if len(metas) < limit:
                return
            # Who wants more than the first wants perhaps all.
            start, last, limit = key_of(metas[-1].tokens), metas[-1].id, 64

    def _learn(self, parent: BlockId, children: SortedKeys[BlockMeta], before: int) -> None:
        with self._lock:
            if self._changes != before or before % 2 or parent in self._known or len(children) >= self._most:
                return
            self._known[parent] = children
            for meta in children.walk():
                self._places[meta.id] = parent, key_of(meta.tokens)
            self._keep_bound()

    def _keep_bound(self) -> None:
        while len(self._places) > self._most:
            _, dropped = self._known.popitem(last=False)
            for meta in dropped.walk():
                self._places.pop(meta.id, None)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A transaction. What is read meanwhile is not believed later; after one that failed, nothing is."""
        with self._lock:
            self._changes += 1
        try:
            yield
        except BaseException:
            self.forget()
            raise
        finally:
            with self._lock:
                self._changes += 1

    def add(self, meta: BlockMeta) -> None:
        with self._lock:
            if (children := self._known.get(meta.parent)) is not None:
                key = key_of(meta.tokens)
                children.add(key, meta)
                self._places[meta.id] = meta.parent, key
                self._keep_bound()

    def remove(self, block: BlockId) -> None:
        with self._lock:
            if (place := self._places.pop(block, None)) is not None:
                parent, key = place
                self._known[parent].remove(key)

    def forget(self) -> None:
        with self._lock:
            self._known.clear()
            self._places.clear()
