"""Block index: the rows of a store's database that list its blocks and its kept prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import Block, BlockId, BlockMeta
from perdure.cache.drop_plan import drop_plan
from perdure.cache.kept_prefixes import KeptPrefixes
from perdure.cache.prefix_search import ANY_TOKEN, beginnings, continuations
from perdure.cache.tiers.codec import PLAIN, StateCodec
from perdure.decode.request import KeptPrefix
from perdure.errors import InvalidInputError
from perdure.store.index import Index

_SELECT = "SELECT id, parent, start, tokens, has_rest, nbytes FROM block"
_TYPES = (bytes, bytes, int, bytes, int, int)


class BlockTable:
    """The blocks of one index, a row each, with their number and bytes. It knows of no files.

    Always holds: the totals change with what they count, in one transaction; a leaf is a block that no other
    follows.
    """

    def __init__(self, index: Index, tier: str, codec: StateCodec = PLAIN) -> None:
        """`tier` is the name of the tier whose blocks these are."""
        self._index = index
        self._codec = codec
        self._tier = tier
        self._clock = self._total("clock")
        """Bytes that were stored so far, and a byte for each use."""
        self.worth: Callable[[BlockId, int], int] = lambda block, clock: clock
        """What a block is worth that is used at a time of the clock."""
        self._touched: dict[BlockId, int] = {}
        self._chains: _Chains | None = None
        """Of which chain each block is; known from when it is first asked for, when room is short."""
        self._children = codec.children(readonly=index.readonly)
        self._starts: set[BlockId] | None = None
        """Names of where chains start, or two of them; known from when it is first asked for."""
        self._count, self.nbytes = self._total("blocks"), self._total("nbytes")

    def __len__(self) -> int:
        return self._total("blocks")

    @property
    def clock(self) -> int:
        return self._clock

    # Reading.

    def lookup(self, block: BlockId) -> BlockMeta | None:
        return next(self._metas(self._index.rows(f"{_SELECT} WHERE id = ?", self._codec.name(block))), None)

    def page(self, *, limit: int | None = None, after: str | None = None) -> list[BlockMeta]:
        """Blocks by their ids: up to `limit`, behind the one with the id `after`."""
        try:
            behind = b"" if after is None else self._codec.name(bytes.fromhex(after))
        except ValueError:
            raise InvalidInputError(f"{after!r} is no id of a block: it has 64 digits of 0 to f") from None
        query = f"{_SELECT} WHERE id > ? ORDER BY id LIMIT ?"
        return list(self._metas(self._index.rows(query, behind, -1 if limit is None else limit)))

    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[BlockMeta]:
        """The blocks that follow `parent`, by their tokens' bytes: from `start` on, or back from it."""
        if self._children is not None:
            yield from self._children.of(parent, start, back, self._read_children)
            return
        within, order, limit = ("<=", "tokens DESC", 1) if back else (">=", "tokens", 1)
        while True:
            query = f"{_SELECT} WHERE parent = ? AND tokens {within} ? ORDER BY {order} LIMIT {limit}"
            rows = self._index.rows(query, parent, start)
            yield from self._metas(rows)
            if len(rows) < limit:
                return
            # A caller that wants more than the first page wants perhaps all.
            within, start, limit = within[0], rows[-1][3], 64

    def _read_children(self, parent: BlockId) -> Iterator[BlockMeta]:
        return self._metas(self._index.rows(f"{_SELECT} WHERE parent = ?", self._codec.name(parent)))

    def child_ids(self, parent: BlockId) -> list[BlockId]:
        """The ids of the blocks that follow `parent`, whatever else their rows say."""
        if self._children is not None:
            return [meta.id for meta in self._read_children(parent)]
        return [row[0] for row in self._index.rows("SELECT id FROM block WHERE parent = ?", parent)]

    def names(self) -> set[bytes]:
        """What stands for the ids of all blocks."""
        return {row[0] for row in self._index.rows("SELECT id FROM block")}

    def rows(self) -> dict[Any, tuple[Any, ...]]:
        """All rows by what stands for their ids, believed or not."""
        return {row[0]: row for row in self._index.rows(_SELECT)}

    def least_worth(self, spared: Callable[[BlockId], bool]) -> tuple[BlockId, int] | None:
        """The leaf of the least worth, of those that are not spared, and what it is worth."""
        limit = 1
        while True:
            leaves = self._index.rows(
                "SELECT id, parent, tokens, used FROM block WHERE leaf = 1 ORDER BY used LIMIT ?", limit
            )
            leaf = next(
                ((name, _number(used)) for name, _, used in self._ids(leaves) if not spared(name)), None
            )
            if leaf is not None or len(leaves) < limit:
                return leaf
            limit *= 2

    def has_several_chains(self, new: Iterable[Block]) -> bool:
        """Whether chains start in more than one place, with those of new blocks. The table is looked through
        for that once."""
        if self._starts is None:
            rows = self._index.rows("SELECT DISTINCT parent FROM block WHERE start = 0 LIMIT 2")
            self._starts = {parent for (parent,) in rows}
        coming = {BlockId(self._codec.name(block.parent)) for block in new if not block.start}
        return len(self._starts | coming) > 1

    def root_of(self, block: BlockId) -> BlockId:
        """Where the chain of a block starts; what is no block here starts one."""
        return self._known_chains().roots.get(block, block)

    def chains(self) -> tuple[Mapping[BlockId, int], Mapping[BlockId, int]]:
        """The bytes of each chain, and when something of it was used last, by where it starts."""
        chains = self._known_chains()
        return chains.nbytes, chains.used

    def _known_chains(self) -> _Chains:
        chains = self._chains
        if chains is None:
            chains = _Chains()
            rows = self._index.rows("SELECT id, parent, tokens, nbytes, used FROM block ORDER BY start")
            for name, parent, nbytes, used in self._ids(rows):
                # What is worth more than its time counts as used now.
                chains.add(name, parent, _number(nbytes), min(_number(used), self._clock))
            self._chains = chains
        return chains

    # Writing.

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction that changes blocks, and the totals with them."""
        before = self._count, self.nbytes
        try:
            with self._children.changing() if self._children else nullcontext(), self._index.writing():
                yield
                for name, value in (
                    ("blocks", self._count),
                    ("nbytes", self.nbytes),
                    ("clock", self._tick()),
                ):
                    self._index.run("INSERT OR REPLACE INTO total VALUES (?, ?)", name, value)
        except BaseException:
            self._count, self.nbytes = before
            self._chains = self._starts = None
            raise

    def add(self, block: Block | BlockMeta, size: int, *, used: int | None = None) -> None:
        """Enter a block whose file has `size` bytes, as used just now unless `used` says otherwise."""
        name = self._codec.name(block.id)
        before = self._index.rows("SELECT nbytes FROM block WHERE id = ?", name)
        more = size - (_number(before[0][0]) if before else 0)
        self._count += not before
        self.nbytes += more
        if self._chains is not None:
            self._chains.add(block.id, block.parent, more, self._clock)
        if self._children is not None:
            self._children.add(_meta(block, size, self._tier))
        if self._starts is not None and not block.start and len(self._starts) < 2:
            self._starts.add(BlockId(self._codec.name(block.parent)))
        self._index.run(
            "INSERT OR REPLACE INTO block VALUES (?, ?, ?, ?, ?, ?, ?,"
            " NOT EXISTS (SELECT 1 FROM block WHERE parent = ?))",
            *self._row(block, size),
            self.worth(block.id, self._tick(size)) if used is None else used,
            name,
        )
        parent = self._codec.name(block.parent)
        self._index.run("UPDATE block SET leaf = 0 WHERE id = ? AND leaf = 1", parent)

    def remove(self, block: BlockId) -> None:
        name = self._codec.name(block)
        rows = self._index.rows("SELECT parent, nbytes FROM block WHERE id = ?", name)
        for parent, nbytes in rows:
            self._index.run("DELETE FROM block WHERE id = ?", name)
            self._index.run(
                "UPDATE block SET leaf = 1 WHERE id = ? AND NOT EXISTS"
                " (SELECT 1 FROM block WHERE parent = ?)",
                parent,
                parent,
            )
            self._count -= 1
            self.nbytes -= _number(nbytes)
            if self._chains is not None:
                self._chains.remove(block, _number(nbytes))
            if self._children is not None:
                self._children.remove(block)

    def clear(self) -> None:
        self._index.run("DELETE FROM block")
        if self._children is not None:
            self._children.forget()
        self._count = self.nbytes = 0
        self._chains = self._starts = None

    def touch(self, block: BlockId) -> None:
        """Note that a block was used just now; it is written down with the next change."""
        self._touched[block] = self.worth(block, self._tick())
        if (chains := self._chains) is not None:
            chains.use(block, self._clock)

    @property
    def has_touched(self) -> bool:
        return bool(self._touched)

    def flush_touches(self) -> None:
        # Others go on adding to it meanwhile: taken out one by one, none is lost.
        while self._touched:
            block, used = self._touched.popitem()
            self._index.run("UPDATE block SET used = ? WHERE id = ?", used, self._codec.name(block))

    def correct(
        self, known: Mapping[Any, tuple[Any, ...]], there: Mapping[BlockId, BlockMeta]
    ) -> tuple[int, int, int]:
        """Have the table, whose rows are `known`, list just the blocks that are there. Tells how many it
        lacked, how many it had too many, and how many wrong. When these were last used is not known."""
        rows = {entry.id: self._row(entry, entry.nbytes) for entry in there.values()}
        names = {row[0] for row in rows.values()}
        missing = [name for name in known if name not in names]
        new = [entry for name, entry in there.items() if rows[name][0] not in known]
        wrong = [entry for name, entry in there.items() if known.get(rows[name][0], rows[name]) != rows[name]]
        with self.writing():
            if self._children is not None:
                self._children.forget()
            for name in missing:
                self._index.run("DELETE FROM block WHERE id = ?", name)
            for entry in [*new, *wrong]:
                self.add(entry, entry.nbytes, used=0)
            self._chains = self._starts = None
            self._index.run("UPDATE block SET leaf = id NOT IN (SELECT parent FROM block)")
            self._count, self.nbytes = len(there), sum(entry.nbytes for entry in there.values())
        return len(new), len(missing), len(wrong)

    def _metas(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[BlockMeta]:
        """The blocks in `rows`. SQLite has no checksums: a row that does not prove itself is not believed."""
        for row in rows:
            if tuple(map(type, row)) != _TYPES:
                continue
            name, parent, start, tokens, has_tail_state, nbytes = row
            if (known := self._codec.unpack(name, parent, tokens)) is None:
                continue
            block, before, data = known
            ids = np.frombuffer(data, "<i4").astype(np.int32)
            yield BlockMeta(block, before, start, ids, bool(has_tail_state), nbytes, self._tier)

    def _ids(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Rows that begin with a block, its parent and its tokens, with the ids of the first two in place of
        all three."""
        for name, parent, tokens, *rest in rows:
            if self._children is None:
                yield name, parent, *rest
            elif (known := self._codec.unpack(name, parent, tokens)) is not None:
                yield known[0], known[1], *rest

    def _row(self, block: Block | BlockMeta, size: int) -> tuple[Any, ...]:
        codec = self._codec
        tokens = codec.pack(block.id, block.parent, block.tokens.astype("<i4").tobytes())
        name, parent = codec.name(block.id), codec.name(block.parent)
        return name, parent, block.start, tokens, int(block.has_tail_state), size

    def _tick(self, nbytes: int = 1) -> int:
        self._clock += nbytes
        return self._clock

    def _total(self, name: str) -> int:
        rows = self._index.rows("SELECT value FROM total WHERE name = ?", name)
        return _number(rows[0][0]) if rows else 0


def _number(value: Any) -> int:
    """A number of the index. SQLite has no checksums: what is none counts for nothing until it is mended."""
    return value if isinstance(value, int) else 0


def _meta(block: Block | BlockMeta, size: int, tier: str) -> BlockMeta:
    tokens, has_tail_state = block.tokens, block.has_tail_state
    return BlockMeta(block.id, block.parent, block.start, tokens, has_tail_state, size, tier)


class _Chains:
    """Of which chain each block of a table is, and what each chain takes.

    Always holds: the bytes of a chain are those of its blocks; one without blocks is not there.
    """

    def __init__(self) -> None:
        self.roots: dict[BlockId, BlockId] = {}
        self.nbytes: dict[BlockId, int] = {}
        self.used: dict[BlockId, int] = {}

    def add(self, block: BlockId, parent: BlockId, nbytes: int, used: int) -> None:
        """A block is there, or takes so many more bytes. Those before it were added before it."""
        root = self.roots.setdefault(block, self.roots.get(parent, parent))
        self.nbytes[root] = self.nbytes.get(root, 0) + nbytes
        self.used[root] = max(self.used.get(root, 0), used)

    def remove(self, block: BlockId, nbytes: int) -> None:
        if (root := self.roots.pop(block, None)) is None:
            return
        self.nbytes[root] -= nbytes
        if not self.nbytes[root]:
            del self.nbytes[root], self.used[root]

    def use(self, block: BlockId, clock: int) -> None:
        if (root := self.roots.get(block)) is not None:
            self.used[root] = clock


class PrefixTable:
    """The prefixes of a store that are kept without an end. A prefix's labels live and go with it.

    How much of a prefix is kept is not written down but looked up: blocks come and go without it.
    """

    def __init__(self, index: Index, blocks: BlockTable, codec: StateCodec = PLAIN) -> None:
        self._index = index
        self._blocks = blocks
        self._codec = codec

    def __len__(self) -> int:
        [(count,)] = self._index.rows("SELECT count(*) FROM record")
        return int(count)

    def all(self) -> list[KeptPrefix]:
        return [prefix for _, prefix in self.page()]

    def page(self, *, limit: int | None = None, after: int = 0) -> list[tuple[int, KeptPrefix]]:
        """Prefixes with their numbers, the oldest first: up to `limit`, behind number `after`."""
        rows = self._index.rows(
            "SELECT number, namespace, tokens, root FROM record WHERE number > ? ORDER BY number LIMIT ?",
            after,
            -1 if limit is None else limit,
        )
        labels: dict[int, set[str]] = {}
        if rows:
            # The labels of these and no others.
            for number, name in self._index.rows(
                "SELECT record, name FROM label WHERE record BETWEEN ? AND ?", rows[0][0], rows[-1][0]
            ):
                if (label := self._codec.open_text(str(name))) is not None:
                    labels.setdefault(number, set()).add(label)
        page = []
        for number, namespace, tokens, root in rows:
            # SQLite has no checksums: what cannot be a prefix is not one.
            if not isinstance(tokens, bytes) or not isinstance(root, bytes):
                continue
            known, owner = self._codec.open_prefix(root, tokens), self._codec.open_text(str(namespace))
            if known is None or owner is None:
                continue
            root, ids = known[0], np.frombuffer(known[1], "<i4").astype(np.int32)
            prefix = KeptPrefix(
                tokens=tuple(ids.tolist()),
                kept=self.kept_length(BlockId(root), ids),
                labels=frozenset(labels.get(number, ())),
                namespace=owner,
                root=BlockId(root),
            )
            page.append((number, prefix))
        return page

    def add(self, prefix: KeptPrefix) -> None:
        """List a prefix, in one transaction."""
        key = self._codec.prefix(prefix.root, _packed(prefix))
        try:
            with self._index.writing():
                self._index.run(
                    "INSERT OR IGNORE INTO record (root, tokens, namespace) VALUES (?, ?, ?)",
                    *key,
                    self._codec.text(prefix.namespace),
                )
                [(number,)] = self._index.rows(
                    "SELECT number FROM record WHERE root = ? AND tokens = ?", *key
                )
                for name in prefix.labels:
                    self._index.run(
                        "INSERT OR IGNORE INTO label VALUES (?, ?)", number, self._codec.text(name)
                    )
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"a label must be valid Unicode text: {error}") from None

    def remove(self, prefix: KeptPrefix) -> None:
        """Take a prefix off the list, within a transaction."""
        key = self._codec.prefix(prefix.root, _packed(prefix))
        self._index.run("DELETE FROM record WHERE root = ? AND tokens = ?", *key)

    def labelled(
        self, labels: Iterable[str], *, namespace: str = ""
    ) -> tuple[list[KeptPrefix], tuple[BlockId, ...]]:
        """The prefixes of a namespace that carry one of `labels`, and the blocks that only they need."""
        needs = KeptPrefixes(self.all())
        chosen = needs.of(frozenset(labels), namespace)
        for prefix in chosen:
            needs.remove(prefix)
        return chosen, drop_plan(self._blocks, chosen, needs, ANY_TOKEN).drop

    def kept_length(self, root: BlockId, tokens: NDArray[np.int32]) -> int:
        """How much of a prefix can be put back. Where a state has a tail, only to the end of a block with
        it."""
        path: list[BlockMeta] = []
        level = [(root, 0)]
        while level:
            parent, at = level.pop()
            for block in beginnings(self._blocks, parent, tokens[at:-1]):
                path.append(block)
                level.append((block.id, at + len(block.tokens)))
            path += continuations(self._blocks, parent, tokens[at:])
        if any(block.has_tail_state for block in path):
            path = [block for block in path if block.has_tail_state and block.end <= len(tokens)]
        return max((min(block.end, len(tokens)) for block in path), default=0)


def _packed(prefix: KeptPrefix) -> bytes:
    return np.array(prefix.tokens, "<i4").tobytes()
