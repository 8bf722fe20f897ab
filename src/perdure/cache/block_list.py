"""Block list: what is kept behind a root, page by page."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.cache.block import BlockId, Entry
from perdure.cache.siblings import key_of
from perdure.cache.tiers import Tiers
from perdure.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInfo:
    """A block as it is listed."""

    id: str
    parent: str
    """The block that it follows; empty for one that starts a chain."""
    start: int
    tokens: int
    nbytes: int
    tier: str
    """Where it is found first."""


def list_blocks(tiers: Tiers, root: BlockId, *, limit: int | None, after: str | None) -> list[BlockInfo]:
    """Up to `limit` blocks behind `root`, each before those that follow it; those behind the block `after`.

    A page costs what it holds, and the way back to the root.
    """
    found: list[BlockInfo] = []
    entry = (
        next(tiers.children(root), None) if after is None else _next(tiers, root, _known(tiers, root, after))
    )
    while entry is not None and (limit is None or len(found) < limit):
        found.append(_info(tiers, root, entry))
        entry = _next(tiers, root, entry)
    return found


def _known(tiers: Tiers, root: BlockId, name: str) -> Entry:
    """The block of that name, if it is one of those behind `root`."""
    try:
        found = above = tiers.lookup(BlockId(bytes.fromhex(name)))
    except ValueError:
        found = above = None
    while above is not None and above.parent != root:
        above = tiers.lookup(above.parent)
    if found is None or above is None:
        raise InvalidInputError(f"there is no block {name!r}, or none any more: list from the first one on")
    return found


def _next(tiers: Tiers, root: BlockId, entry: Entry) -> Entry | None:
    """What comes behind `entry`: what follows it first, else its next sibling, or that of the nearest block
    before it that has one."""
    found = next(tiers.children(entry.id), None)
    above: Entry | None = entry
    while found is None and above is not None:
        found = next(tiers.children(above.parent, start=key_of(above.tokens) + b"\0"), None)
        above = None if above.parent == root else tiers.lookup(above.parent)
    return found


def _info(tiers: Tiers, root: BlockId, entry: Entry) -> BlockInfo:
    here = entry.id in tiers.memory or tiers.lower is None
    return BlockInfo(
        id=entry.id.hex(),
        parent="" if entry.parent == root else entry.parent.hex(),
        start=entry.start,
        tokens=len(entry.tokens),
        nbytes=entry.nbytes,
        tier=tiers.memory.name if here or tiers.lower is None else tiers.lower.name,
    )
