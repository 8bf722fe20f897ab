"""Blocks in drawers of this process: `drawer://NAME`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from perdure import CorruptStateError, InvalidInputError, KeptPrefix
from perdure.spi.cache import Block, BlockId, BlockMeta, BlockTier, TierOpener, key_of

_drawers: dict[str, dict[BlockId, tuple[BlockMeta, bytes]]] = {}
"""Blocks by the URL and by their names: each with its bytes, which prove themselves."""


class DrawerTier(BlockTier):
    name = "drawer"

    def __init__(self, url: str) -> None:
        super().__init__()
        self.budget = 1 << 20
        self._blocks = _drawers.setdefault(url, {})

    @property
    def nbytes(self) -> int:
        return sum(len(data) for _, data in list(self._blocks.values()))

    def lookup(self, block: BlockId) -> BlockMeta | None:
        meta, _ = self._blocks.get(block, (None, b""))
        return meta

    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[BlockMeta]:
        metas = [meta for meta, _ in list(self._blocks.values()) if meta.parent == parent]
        metas = [meta for meta in metas if (key_of(meta.tokens) < start) == back]
        return iter(sorted(metas, key=lambda meta: key_of(meta.tokens), reverse=back))

    def load(self, block: BlockId) -> Block | None:
        try:
            return Block.unpack(self._blocks[block][1], block)
        except (KeyError, CorruptStateError):
            return None

    def store(self, blocks: Sequence[Block]) -> int:
        stored = 0
        for block in blocks:
            data = b"".join(block.pack())
            if self.nbytes + len(data) > self.budget or (block.start and block.parent not in self._blocks):
                continue
            meta = BlockMeta(
                block.id, block.parent, block.start, block.tokens, block.has_tail_state, len(data), self.name
            )
            self._blocks[block.id] = meta, data
            stored += 1
        return stored

    def drop(self, blocks: Iterable[BlockId], prefixes: Iterable[KeptPrefix] = ()) -> None:
        for block in blocks:
            self.drop([meta.id for meta, _ in list(self._blocks.values()) if meta.parent == block])
            self.forget([block])

    def forget(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self._blocks.pop(block, None)

    def clear(self) -> None:
        self._blocks.clear()

    def close(self) -> None:
        pass


class DrawerOpener(TierOpener):
    def check(self, url: str) -> None:
        if not url.partition("://")[2]:
            raise InvalidInputError(f"a drawer has a name: drawer://NAME, got {url!r}")

    def open(self, url: str, *, key: bytes, identity: bytes) -> BlockTier:
        return DrawerTier(url)


OPENER = DrawerOpener()
