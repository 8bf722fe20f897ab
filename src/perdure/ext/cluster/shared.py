"""Shared tier: blocks that several machines read and write, encrypted with a key that they share.

A block is two objects in a `Place` (places.py): its state, under a name that only the key can make; and its
line in a *list*, an object with what is known of a few blocks without their state. A machine reads the lists
of others every few seconds into an index at hand, and the state when it needs it.

    NAME (64 hex digits)             nonce 12 | AES-256-GCM of the block's file, bound to NAME
    list-IDENTITY-RANDOM             nonce 12 | AES-256-GCM of the lines, bound to its own name
    list-IDENTITY-mRANDOM            the same, of several lists that were merged

Lists do not pile up: where there are many, the replica that notices merges their lines into a few lists,
without those of blocks that are gone, and only then deletes them. Two that do so at once write a line twice.

What was not encrypted with the key is not believed. Machines whose engines differ (CPU
variant, library, layers) have other identities, and so other blocks and other lists.
"""

from __future__ import annotations

import errno
import itertools
import logging
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from perdure import CorruptStateError, KeptPrefix, StoreError, TooLargeError
from perdure.ext.cluster.places import Place, open_place, parse_place
from perdure.ext.encryption.cipher import CIPHER_BYTES, Cipher
from perdure.spi.cache import (
    AnyBlock,
    Block,
    BlockId,
    BlockMeta,
    BlockTable,
    BlockTier,
    Index,
    Shares,
    TierOpener,
    block_id,
)
from perdure.spi.runtime import BackgroundThread

log = logging.getLogger("perdure.store")

T = TypeVar("T")

_LINE = struct.Struct("<32s32sQIQB")
"""Id, parent, first token, number of tokens, bytes of the file, whether it has a tail state."""
_LIST = "list-"
_LOOKED_AT = 2.0
"""Seconds after which the lists of others are looked for again."""
_NO_FILE = (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO)
"""What a place says of a link, a pipe, a folder and a socket."""
_REST = 5.0
"""Seconds for which a place that failed is asked nothing."""
_PATIENCE = 10.0
_LARGEST = 1 << 30
"""Bytes of a block; a larger one is not read."""
_SPARE = 64 << 20
"""By which a block may be larger than its line says: another machine may have added a tail state."""
_LIST_BYTES = 64 << 20
_LISTS = 1 << 16
"""Bytes of a list, and how many lists are looked at."""
_FRESH = 128
"""Lists that were not merged, at most: of all machines together, give or take what is written meanwhile."""
_MERGED = 4096
"""Lines of a merged list."""


class SharedTier(BlockTier):
    """Blocks in a place of several machines, within a byte budget. For any thread.

    Always holds: what is loaded was encrypted with the key under its own name and proves itself as a block. A
    place that fails or hangs is asked nothing for some seconds: it costs a computation, never a reply.
    """

    patience = _PATIENCE
    index_at_hand = True

    def __init__(
        self, place: Place, *, key: bytes, identity: bytes, budget: int, tokens: int | None = None
    ) -> None:
        """`tokens` is the last position that is kept here; None: all."""
        super().__init__()
        self.name = place.name
        self.budget = budget
        self.place = place
        self._cipher = Cipher(key)
        self._tokens = tokens
        self._prefix = f"{_LIST}{self._cipher.name(b'identity' + identity).hex()[:16]}-"
        self._index = Index(None, readonly=False)
        self._table = BlockTable(self._index, self.name)
        self._table.worth = lambda block, clock: self.eviction.worth(block, clock, self.budget)
        self._changing = threading.RLock()
        self._lists: set[str] = set()
        """Those that were read."""
        self._foreign: set[str] = set()
        """Those that no machine with the key wrote: they are neither read again nor merged."""
        self._unlisted: dict[BlockId, bytes] = {}
        """Lines of blocks that are in the place, and in no list yet: nobody else knows of them."""
        self._failed_at: float | None = None
        self.loaded = self.missed = self.stored = self.refused = 0
        """Counters: blocks read, not found, written; calls that were not made while it rests."""
        self._ending = threading.Event()
        self._thread = BackgroundThread(self._watch, name=f"perdure-{self.name}-lists", restart=True)
        self._thread.start()

    # Reading.

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def __len__(self) -> int:
        return len(self._table)

    def lookup(self, block: BlockId) -> BlockMeta | None:
        return None if self._rests() else self._table.lookup(block)

    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[BlockMeta]:
        return iter(()) if self._rests() else self._table.children(parent, start=start, back=back)

    def load(self, block: BlockId) -> Block | None:
        name, known = self._cipher.name(block).hex(), self._table.lookup(block)
        limit = _LARGEST if known is None else min(_LARGEST, known.nbytes + _SPARE)
        data = self._got(name, limit + CIPHER_BYTES)
        plain = None if data is None else self._cipher.decrypt(name, data)
        try:
            loaded = None if plain is None else Block.unpack(plain, block)
        except CorruptStateError:
            loaded = None
        if loaded is None:
            self.missed += 1
        else:
            self.loaded += 1
            self._table.touch(block)
        return loaded

    # Writing.

    def store(self, blocks: Sequence[Block]) -> int:
        stored: list[tuple[Block, int]] = []
        for block in blocks:
            if self._tokens is not None and block.end > self._tokens:
                continue
            known = self._table.lookup(block.id)
            if known is not None and known.has_tail_state >= block.has_tail_state:
                stored.append((block, known.nbytes))
                continue
            rooted = not block.start or self._table.lookup(block.parent) is not None
            if not rooted and all(block.parent != each.id for each, _ in stored):
                continue
            if not self._make_room(block, spared={each.id for each, _ in stored} | {block.parent}):
                continue
            name = self._cipher.name(block.id).hex()
            encrypted = self._cipher.encrypt(name, b"".join(block.pack()))
            self._asked(lambda name=name, data=encrypted: self.place.put(name, data))  # type: ignore[misc]
            self.stored += 1
            self.written += len(encrypted)
            with self._changing, self._table.writing():
                self._table.add(block, block.file_size)
                self._unlisted[block.id] = _line(block, block.file_size)
            stored.append((block, 0))
        # After the state: a reader of the list finds every block that it names.
        self._write_list()
        return len(stored)

    def _write_list(self) -> None:
        """List new blocks for other replicas, also those that could not be listed while the place failed."""
        while True:
            with self._changing:
                lines = dict(itertools.islice(self._unlisted.items(), _MERGED))
            if not lines:
                return
            name = f"{self._prefix}{secrets.token_hex(8)}"
            encrypted = self._cipher.encrypt(name, b"".join(lines.values()))
            self._asked(lambda name=name, data=encrypted: self.place.put(name, data))  # type: ignore[misc]
            with self._changing:
                self._lists.add(name)
                for block, line in lines.items():
                    # One that gained a tail state meanwhile is to be listed again.
                    if self._unlisted.get(block) is line:
                        del self._unlisted[block]

    def drop(self, blocks: Iterable[BlockId], prefixes: Iterable[KeptPrefix] = ()) -> None:
        left, names = list(blocks), list[BlockId]()
        with self._changing:
            while left:
                block = left.pop()
                left += self._table.child_ids(block)
                names.append(block)
            self._remove(names)

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Only here: another machine may have written it again meanwhile."""
        with self._changing, self._table.writing():
            for block in blocks:
                self._table.remove(block)
                self._unlisted.pop(block, None)

    def clear(self) -> None:
        with self._changing:
            self._remove([BlockId(name) for name in self._table.names()])
            self._asked(lambda: self.place.delete(sorted({*self._lists, *self.place.names(self._prefix)})))
            self._lists.clear()

    def close(self) -> None:
        self._ending.set()
        self._thread.join(1.0)
        self.place.close()
        self._index.close()

    # Lists.

    def refresh(self) -> None:
        """Read the lists of others that were not read yet, and merge them where there are many."""
        self._write_list()
        names = self._asked(lambda: set(itertools.islice(self.place.names(self._prefix), _LISTS)))
        self._foreign &= names
        names -= self._foreign
        for name in sorted(names - self._lists):
            plain = self._list(name)
            with self._changing, self._table.writing():
                for meta in _metas(plain or b"", self.name):
                    if self._table.lookup(meta.id) is None:
                        self._table.add(meta, meta.nbytes)
            self._lists.add(name)
        names -= self._foreign
        # Those that were merged away are not asked for again.
        self._lists &= names
        fresh = {name for name in names if not name.startswith(f"{self._prefix}m")}
        if len(names - fresh) > 2 * (len(self._table) // _MERGED + 1):
            self._merge(names)
        elif len(fresh) > _FRESH:
            self._merge(fresh)

    def _merge(self, names: set[str]) -> None:
        """Write the lines of some lists into few, without those of blocks that are gone, and delete them."""
        lines: dict[BlockId, bytes] = {}
        read: list[str] = []
        for name in sorted(names):
            if (plain := self._list(name)) is not None:
                read.append(name)
                for meta in _metas(plain, self.name):
                    if self._table.lookup(meta.id) is not None:
                        lines[meta.id] = _line(meta, meta.nbytes)
        left = list(lines.values())
        for at in range(0, len(left), _MERGED):
            name = f"{self._prefix}m{secrets.token_hex(8)}"
            encrypted = self._cipher.encrypt(name, b"".join(left[at : at + _MERGED]))
            self._asked(lambda name=name, data=encrypted: self.place.put(name, data))  # type: ignore[misc]
            self._lists.add(name)
        # After the merged lists: a reader meanwhile finds each line at least once.
        self._asked(lambda: self.place.delete(read))
        self._lists -= set(read)

    def _list(self, name: str) -> bytes | None:
        """The lines of a list; None where it is gone, or was not encrypted with the key."""
        data = self._got(name, _LIST_BYTES)
        plain = None if data is None else self._cipher.decrypt(name, data)
        if plain is None and data is not None:
            log.warning(
                "a list of blocks in %s was not encrypted with this cluster's key: left out", self.name
            )
            self._foreign.add(name)
        return plain

    def _got(self, name: str, limit: int) -> bytes | None:
        """An object of the place; None where there is none, or where it cannot be one of ours: too large, a
        link, a pipe, a folder. That is no failure of the place."""

        def get() -> bytes | None:
            try:
                return self.place.get(name, limit)
            except TooLargeError as error:
                why: Exception = error
            except OSError as error:
                if error.errno not in _NO_FILE:
                    raise
                why = error
            log.warning("an object in %s is left out, which no engine wrote there: %s", self.name, why)
            if name.startswith(_LIST):
                self._foreign.add(name)
            return None

        return self._asked(get)

    def identities(self) -> set[str]:
        """What the engines are called that have written here: those of others are of no use to this one."""
        return writers(self.place)

    @property
    def identity(self) -> str:
        return self._prefix[len(_LIST) : -1]

    def _watch(self) -> None:
        failing = False
        while True:
            try:
                self.refresh()
                failing = False
            except Exception as error:
                # Once: a place that is gone is asked every few seconds.
                if not self._ending.is_set() and not failing:
                    log.warning("the lists of %s cannot be read: %s", self.name, error)
                failing = True
            if self._ending.wait(_LOOKED_AT):
                return

    # Inside.

    def _make_room(self, block: Block, spared: set[BlockId]) -> bool:
        """Whether a block fits, once the leaves of the least worth are gone: those of namespaces that hold
        more than their share, as far as this machine knows whose they are."""
        if self._table.nbytes + block.file_size <= self.budget:
            return True

        def is_spared(each: BlockId) -> bool:
            return each in spared or self.pinned(each)

        with self._changing:
            shares = None
            if self._table.has_several_chains([block]):
                shares = Shares(self._table, self.eviction, self.budget)
                shares.wants(block, block.file_size)
            while self._table.nbytes + block.file_size > self.budget:
                leaf = (
                    self._table.least_worth(is_spared) if shares is None else shares.victim(block, is_spared)
                )
                if leaf is None or not self.eviction.may_evict(block.id, leaf[1]):
                    return False
                self._remove([leaf[0]])
        return True

    def _remove(self, blocks: Sequence[BlockId]) -> None:
        self._asked(lambda: self.place.delete([self._cipher.name(block).hex() for block in blocks]))
        with self._changing, self._table.writing():
            for block in blocks:
                self._table.remove(block)
                self._unlisted.pop(block, None)

    def _rests(self) -> bool:
        return self._failed_at is not None and time.monotonic() - self._failed_at < _REST

    def _asked(self, call: Callable[[], T]) -> T:
        """What the place answers; `StoreError` where it fails, and at once while it rests after that."""
        if self._rests():
            self.refused += 1
            raise StoreError(f"the {self.name} tier failed, and is asked again in {_REST:g} s")
        try:
            answer = call()
        except Exception as error:
            self._failed_at = time.monotonic()
            raise StoreError(f"the {self.name} tier failed: {error}") from error
        self._failed_at = None
        return answer


def writers(place: Place) -> set[str]:
    """What the engines are called that have written to a place, by their lists."""
    return {name[len(_LIST) :].split("-")[0] for name in place.names(_LIST)}


def _line(block: AnyBlock, nbytes: int) -> bytes:
    head = _LINE.pack(block.id, block.parent, block.start, len(block.tokens), nbytes, block.has_tail_state)
    return head + block.tokens.astype("<i4").tobytes()


def _metas(data: bytes, tier: str) -> Iterator[BlockMeta]:
    at = 0
    while at + _LINE.size <= len(data):
        name, parent, start, count, nbytes, tail = _LINE.unpack_from(data, at)
        at += _LINE.size
        tokens = np.frombuffer(data[at : at + 4 * count], "<i4").astype(np.int32)
        at += 4 * count
        if len(tokens) == count and block_id(BlockId(parent), tokens) == name and nbytes <= _LARGEST:
            yield BlockMeta(BlockId(name), BlockId(parent), start, tokens, bool(tail), nbytes, tier)


class SharedTierOpener(TierOpener):
    """Opens the tier in a directory, a bucket or a Redis server."""

    def check(self, url: str) -> None:
        parse_place(url)

    def open(self, url: str, *, key: bytes, identity: bytes) -> BlockTier:
        place, size, tokens = open_place(url)
        return SharedTier(place, key=key, identity=identity, budget=size, tokens=tokens)


OPENER = SharedTierOpener()
