"""Block folder: the files of blocks, by their names."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from perdure.cache.block import Block, BlockId
from perdure.errors import CorruptStateError
from perdure.store import block_file
from perdure.store.block_table import IndexEntry
from perdure.store.durable import explained, make_folder, sync_folder, write_file

NAME = re.compile("[0-9a-f]{64}")


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
        with explained(self.folder):
            for folder in self.folder.iterdir():
                if folder.is_dir():
                    yield from folder.iterdir()

    def read(self, path: Path) -> Block | None:
        """The block of a file; None where it is gone or damaged. One that may not be read is neither."""
        with explained(path):
            try:
                return block_file.unpack(path.read_bytes(), BlockId(bytes.fromhex(path.name)))
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
            write_file(self.path(block.id), block_file.pack(block))
        for folder in folders:
            sync_folder(folder)
        if not folders <= self._durable:
            sync_folder(self.folder)
            self._durable |= folders

    def delete(self, paths: Iterable[Path]) -> None:
        """Delete files for good: what was cleared must not come back, not even after a power cut."""
        folders = set()
        for path in paths:
            with explained(path), suppress(FileNotFoundError):
                path.unlink()
                folders.add(path.parent)
        for folder in folders:
            sync_folder(folder)

    def inspect(self, path: Path) -> IndexEntry | None:
        """What the file of a block says of it, if it is whole. Its state is not kept: a store may be larger
        than memory."""
        if not NAME.fullmatch(path.name) or path.parent.name != path.name[:2]:
            return None
        block = self.read(path)
        if block is None:
            return None
        size = block_file.size(block)
        return IndexEntry(block.id, block.parent, block.start, block.tokens, block.has_tail_state, size)

    def quarantine(self, path: Path) -> None:
        with explained(path), suppress(FileNotFoundError):
            make_folder(self.quarantined, ours=True)
            os.replace(path, self.quarantined / path.name)
