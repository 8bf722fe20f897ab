"""Archive tier: the blocks of another folder of a store, which are read and never added to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from perdure.cache.block import Block, BlockId
from perdure.cache.tiers.codec import Encryption
from perdure.cache.tiers.disk import DiskTier
from perdure.decode.request import KeptPrefix
from perdure.errors import StoreLockedError

MODELS = "models"
"""The folder of a store with the folders of single models."""
_PATIENCE, _NAP = 10.0, 0.05
"""Seconds for another engine of the store to be done with what it drops."""


def model_folder(store: Path, digest: str) -> Path:
    """Where the blocks of one model are, beside those of others that are served at the same time."""
    return store / MODELS / digest[:16]


def block_folders(store: Path) -> list[Path]:
    """All folders of a store that have blocks: its own, and those of single models."""
    folders = [store, *sorted((store / MODELS).glob("*"))]
    return [folder for folder in folders if (folder / "blocks").is_dir()]


class ArchiveTier(DiskTier):
    """The other place where a model's blocks may lie: the store's own folder for a model that is served
    beside others, and the model's folder for an engine that has the store to itself.

    Always holds: nothing is added here. What is read from here is stored in the tiers before it, so that it
    is read once. What is dropped is dropped here too, or it would come back.
    """

    name = "archive"
    keeps_prefixes = False

    def __init__(self, folder: Path, encryption: Encryption | None = None) -> None:
        super().__init__(folder, budget=0, readonly=True, encryption=encryption)
        self._encryption = encryption

    def store(self, blocks: Sequence[Block]) -> int:
        return 0

    def drop(self, blocks: Iterable[BlockId], prefixes: Iterable[KeptPrefix] = ()) -> None:
        names = [block for block in blocks if self.lookup(block) is not None]
        if names:
            with self._writing() as disk:
                disk.drop(names)

    def forget(self, blocks: Iterable[BlockId]) -> None:
        names = list(blocks)
        if names:
            with self._writing() as disk:
                disk.forget(names)

    def clear(self) -> None:
        with self._writing() as disk:
            disk.clear()

    @contextmanager
    def _writing(self) -> Iterator[DiskTier]:
        """The folder, open for writing for as long as it takes. Engines beside this one do the same."""
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                disk = DiskTier(self.folder, budget=1 << 62, encryption=self._encryption)
                break
            except StoreLockedError:
                if time.monotonic() >= end:
                    raise
                time.sleep(_NAP)
        with closing(disk):
            yield disk


def archive_of(
    store: Path, digest: str, *, beside: bool, encryption: Encryption | None = None
) -> ArchiveTier | None:
    """The other place of a model's blocks, where there is one. `beside`: the model has its own folder."""
    folder = store if beside else model_folder(store, digest)
    if not (folder / "index.sqlite").is_file():
        return None
    return ArchiveTier(folder, encryption)
