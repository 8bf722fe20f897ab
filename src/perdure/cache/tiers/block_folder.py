"""Block folder: the files of blocks, one each."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from perdure.atomic import make_folder, read_file, sync_folder, translate_os_errors, write_file
from perdure.cache.block import MAGIC, Block, BlockId, BlockMeta
from perdure.cache.tiers.codec import PLAIN, StateCodec
from perdure.errors import CorruptStateError, TooLargeError

NAME = re.compile("[0-9a-f]{64}")
"""What the file of a block is called."""
_LARGEST = 1 << 32
"""Bytes of a block file; a larger one is damaged."""


class BlockFolder:
    """A file a block, in folders by the first two digits of its name. It knows of no index.

    Always holds: a file has its name only once all of it is on the disk.
    """

    def __init__(self, store: Path, codec: StateCodec = PLAIN) -> None:
        self.codec = codec
        self.folder = store / "blocks"
        self.quarantined = store / "quarantine"
        """Where damaged files go."""
        self._durable: set[Path] = set()

    def path(self, block: BlockId) -> Path:
        name = self.codec.name(block).hex()
        return self.folder / name[:2] / name

    def size(self, block: Block) -> int:
        """How long the file of a block is."""
        return block.file_size + self.codec.overhead

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
                return self._unpack(path.name, read_file(path, _LARGEST))
            except FileNotFoundError:
                if not self.folder.is_dir():
                    # Not the file is gone but the mount, which may come back.
                    raise
                return None
            except (IsADirectoryError, CorruptStateError, TooLargeError):
                return None
            except OSError as error:
                # A sector that is gone, or no regular file.
                if error.errno not in (errno.EIO, errno.EINVAL):
                    raise
                return None

    def _unpack(self, name: str, data: bytes) -> Block:
        if (plain := self.codec.decode(name, data)) is None:
            raise CorruptStateError("a block file was not encrypted by this key, or is damaged")
        block = Block.unpack(plain)
        if self.codec.name(block.id).hex() != name:
            raise CorruptStateError("a block file is not the block that it is named")
        return block

    def encode_plain(self, path: Path) -> Path:
        """Replace a plain file of a block by one of the codec, and return its path. Any other file stays as
        it is."""
        with translate_os_errors(path):
            if not self._must_not_stay(path):
                return path
            try:
                block = Block.unpack(read_file(path, _LARGEST), BlockId(bytes.fromhex(path.name)))
            except (CorruptStateError, ValueError):
                return path
        self.write([block])
        self.delete([path])
        return self.path(block.id)

    def write(self, blocks: Sequence[Block]) -> None:
        """Put the files and their names onto the disk."""
        folders = {self.path(block.id).parent for block in blocks}
        for folder in folders:
            if not folder.is_dir():
                with translate_os_errors(folder):
                    # Not what is above it: where that is gone, a mount is, and nothing belongs in its place.
                    folder.mkdir(0o700, exist_ok=True)
        for block in blocks:
            path = self.path(block.id)
            write_file(path, self.codec.encode(path.name, block.pack()))
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
        nbytes = self.size(block)
        return BlockMeta(
            block.id, block.parent, block.start, block.tokens, block.has_tail_state, nbytes, tier
        )

    def quarantine(self, path: Path) -> None:
        with translate_os_errors(path), suppress(FileNotFoundError):
            if self._must_not_stay(path):
                self.delete([path])
            elif self.folder.is_dir():
                make_folder(self.quarantined, ours=True)
                os.replace(path, self.quarantined / path.name)

    def _must_not_stay(self, path: Path) -> bool:
        """Nothing plain is kept in an encrypted folder, not even what is damaged."""
        if self.codec is PLAIN or not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
