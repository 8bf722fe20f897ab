"""Encrypted codec: block files and rows of an index that only the key can read.

    blocks/NA/NAME       nonce 12 | AES-256-GCM of the block's file, bound to NAME
    index.sqlite         names for ids, and tokens, namespaces and labels encrypted, bound to their names

NAME is made of the block's id by the key: it reveals nothing of what is in the file, and cannot be guessed.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from perdure.ext.encryption.cipher import CIPHER_BYTES, Cipher
from perdure.spi.cache import (
    BlockId,
    BlockMeta,
    ChildLookup,
    SortedKeys,
    StateCodec,
    block_id_of,
    key_of,
)

_KNOWN = 65_536
"""Blocks whose place among their siblings is remembered: some 40 MB."""


class EncryptedCodec(StateCodec):
    """State that only a key can read."""

    overhead = CIPHER_BYTES
    suffix = ".sealed"

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(key, b"disk")

    def name(self, what: bytes) -> bytes:
        return self._cipher.name(what)

    def encode(self, name: str, parts: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        return [self._cipher.encrypt(name, b"".join(parts))]

    def decode(self, name: str, data: bytes) -> bytes | None:
        return self._cipher.decrypt(name, data)

    # Rows of an index.

    def pack(self, block: bytes, parent: bytes, tokens: bytes) -> bytes:
        return self._cipher.encrypt(self.name(block).hex(), parent + tokens, repeatable=True)

    def unpack(self, name: bytes, parent: bytes, packed: bytes) -> tuple[BlockId, BlockId, bytes] | None:
        if (columns := self.open_prefix(name, packed)) is None:
            return None
        before, tokens = columns
        block = block_id_of(before, tokens)
        # Its columns, too: a row of which one was changed leads astray.
        if self.name(block) != name or self.name(before) != parent:
            return None
        return block, BlockId(before), tokens

    def prefix(self, root: bytes, tokens: bytes) -> tuple[bytes, bytes]:
        name = self.name(b"prefix\0" + root + tokens)
        return name, self._cipher.encrypt(name.hex(), root + tokens, repeatable=True)

    def open_prefix(self, name: bytes, packed: bytes) -> tuple[bytes, bytes] | None:
        data = self._cipher.decrypt(name.hex(), packed)
        return None if data is None or len(data) < 32 or len(data) % 4 else (data[:32], data[32:])

    def text(self, text: str) -> str:
        return self._cipher.encrypt("text", text.encode(), repeatable=True).hex()

    def open_text(self, packed: str) -> str | None:
        try:
            data = self._cipher.decrypt("text", bytes.fromhex(packed))
        except ValueError:
            return None
        return None if data is None else data.decode()

    def children(self, *, readonly: bool) -> ChildLookup:
        # Only the writer sees all changes.
        return KnownChildren(0 if readonly else _KNOWN)


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
            # A caller that wants more than the first page wants perhaps all.
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
