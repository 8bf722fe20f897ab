"""Block files: a block as bytes that describe and prove themselves, and the folder of such files.

    magic 8 | version u32 | tokens u32 | start u64 | row bytes u64 | rows u8 | tail bytes u64 (2**64-1: none)
    | id 32 | parent 32 | checksum 16
    token ids i32 each | rows | tail state

All little-endian. The checksum (XXH3-128) is over every other byte of the file. The id is the SHA-256 of
parent and tokens, so a file under another block's name proves itself wrong.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from perdure.cache.block import HEADER, MAGIC, NO_TAIL, VERSION, Block, BlockId, BlockMeta, block_id
from perdure.errors import CorruptStateError
from perdure.store.durable import make_folder, sync_folder, translate_os_errors, write_file

NAME = re.compile("[0-9a-f]{64}")
_HEAD = HEADER.size + 16


def size(block: Block) -> int:
    """How long the file of `block` is."""
    return _HEAD + 4 * len(block.tokens) + block.state_bytes


def pack(block: Block) -> list[bytes | memoryview]:
    """The parts of the file of `block`, in order. Its checksum goes with it, so that damage in memory is
    damage in the file."""
    return [block.header() + block.checksum, *block.parts()]


def unpack(data: bytes | memoryview, expected: BlockId | None = None) -> Block:
    """The block in `data`, all of it verified; `expected` is the id that it must have."""
    view = memoryview(data)
    if len(view) < _HEAD or view[:8] != MAGIC:
        raise CorruptStateError(f"not a block file: {len(view)} bytes without its mark at the start")
    _, version, n_tokens, start, row_bytes, has_rows, n_tail, name, parent = HEADER.unpack_from(view)
    if version != VERSION:
        raise CorruptStateError(f"a block file of format {version}; this perdure reads format {VERSION}")
    rows_end = _HEAD + 4 * n_tokens + (n_tokens * row_bytes if has_rows else 0)
    end = rows_end + (0 if n_tail == NO_TAIL else n_tail)
    if len(view) != end:
        raise CorruptStateError(f"a block file has {len(view)} bytes, its header says {end}")
    checksum = bytes(view[HEADER.size : _HEAD])
    digest = xxhash.xxh3_128(view[: HEADER.size])
    digest.update(view[_HEAD:])
    if digest.digest() != checksum:
        raise CorruptStateError("a block file is damaged: its checksum does not match")
    tokens = np.frombuffer(view[_HEAD : _HEAD + 4 * n_tokens], "<i4").astype(np.int32)
    if block_id(BlockId(parent), tokens) != name or (expected is not None and name != expected):
        raise CorruptStateError("a block file is not the block that it is named")
    if not n_tokens or start >= 2**63:
        raise CorruptStateError(f"a block file of {n_tokens} tokens from token {start} on cannot be")
    rows = tail_state = None
    if has_rows:
        body = view[_HEAD + 4 * n_tokens : rows_end]
        rows = np.frombuffer(body, np.uint8).reshape(n_tokens, row_bytes)
    if n_tail != NO_TAIL:
        tail_state = np.frombuffer(view[rows_end:], np.uint8)
    block = Block(BlockId(name), BlockId(parent), start, tokens, rows, tail_state, checksum)
    if block.header() != view[: HEADER.size]:
        raise CorruptStateError("a block file is damaged: its header says the same in other words")
    return block


class BlockFolder:
    """A file a block, in folders by the first two digits of its name. It knows of no index.

    Always holds: a file has its name only once all of it is on the disk.
    """

    def __init__(self, store: Path) -> None:
        self.folder = store / "blocks"
        self.quarantined = store / "quarantine"
        """Where damaged files go."""
        self._durable: set[Path] = set()

    def path(self, block: BlockId) -> Path:
        name = block.hex()
        return self.folder / name[:2] / name

    def files(self) -> Iterator[Path]:
        """Whatever lies where block files are. One that may not be seen is not taken for gone."""
        with translate_os_errors(self.folder):
            for folder in self.folder.iterdir():
                if folder.is_dir():
                    yield from folder.iterdir()

    def read(self, path: Path) -> Block | None:
        """The block of a file; None where it is gone or damaged. One that may not be read is neither."""
        with translate_os_errors(path):
            try:
                return unpack(path.read_bytes(), BlockId(bytes.fromhex(path.name)))
            except (FileNotFoundError, IsADirectoryError, CorruptStateError):
                return None
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                return None

    def write(self, blocks: Sequence[Block]) -> None:
        """Put the files and their names onto the disk."""
        folders = {self.path(block.id).parent for block in blocks}
        for folder in folders:
            make_folder(folder)
        for block in blocks:
            write_file(self.path(block.id), pack(block))
        for folder in folders:
            sync_folder(folder)
        if not folders <= self._durable:
            sync_folder(self.folder)
            self._durable |= folders

    def delete(self, paths: Iterable[Path]) -> None:
        """Delete files for good: what was cleared must not come back, not even after a power cut."""
        folders = set()
        for path in paths:
            with translate_os_errors(path), suppress(FileNotFoundError):
                path.unlink()
                folders.add(path.parent)
        for folder in folders:
            sync_folder(folder)

    def inspect(self, path: Path, tier: str) -> BlockMeta | None:
        """What the file of a block says of it, if it is whole. Its state is not kept: a store may be larger
        than memory."""
        if not NAME.fullmatch(path.name) or path.parent.name != path.name[:2]:
            return None
        block = self.read(path)
        if block is None:
            return None
        nbytes = size(block)
        return BlockMeta(
            block.id, block.parent, block.start, block.tokens, block.has_tail_state, nbytes, tier
        )

    def quarantine(self, path: Path) -> None:
        with translate_os_errors(path), suppress(FileNotFoundError):
            make_folder(self.quarantined, ours=True)
            os.replace(path, self.quarantined / path.name)
