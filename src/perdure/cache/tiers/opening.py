"""Opening lower tiers: the folders of a store, and the places of several machines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from perdure.cache.tiers.archive import archive_of, model_folder
from perdure.cache.tiers.base import BlockTier, tier_opener
from perdure.cache.tiers.codec import Encryption
from perdure.cache.tiers.disk import DiskTier
from perdure.errors import InvalidInputError, StoreError

log = logging.getLogger("perdure.engine")


def disk_tiers(
    store: Path, digest: str, budget: int, *, own_blocks: bool, encryption: Encryption | None
) -> list[BlockTier]:
    """The folder that the blocks of a model are written to, and the other one where some may be. With
    `own_blocks` that is a folder inside the store."""
    folder = model_folder(store, digest) if own_blocks else store
    disk = DiskTier(folder, budget=budget, encryption=encryption)
    if encryption is not None:
        encryption.prepare_store(store)
    try:
        archive = archive_of(store, digest, beside=own_blocks, encryption=encryption)
    except StoreError as error:
        # What cannot be read there is computed again.
        log.warning("the other blocks of this model cannot be read: %s", error)
        archive = None
    return [disk] if archive is None else [disk, archive]


def shared_tiers(urls: Sequence[str], key: bytes | None, identity: bytes) -> list[BlockTier]:
    """The places of several machines, in order. One that cannot be reached now is left out."""
    tiers: list[BlockTier] = []
    for url in urls:
        if key is None:
            raise InvalidInputError("blocks of several machines need the key of their cluster")
        try:
            tier = tier_opener(url).open(url, key=key, identity=identity)
        except StoreError as error:
            log.warning("%s; this engine runs without it until its next start", error)
            continue
        if any(each.name == tier.name for each in tiers):
            tier.close()
            raise InvalidInputError(f"one place of a kind: {tier.name} is named twice")
        tiers.append(tier)
    return tiers
