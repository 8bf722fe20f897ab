"""Prefix tree as it is shown: runs of blocks that nothing branches off from, and what follows each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import BlockId, Entry
from perdure.cache.record import Record
from perdure.cache.tiers import Tiers

Ids = NDArray[np.int32]

_BLOCKS = 2048
"""Blocks that one look reads: the engine waits for it."""
_SHOWN = 48
"""Tokens of a run that are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRun:
    """Blocks one after another, up to where several follow or none. `id` names the last of them."""

    id: str
    start: int
    length: int
    tokens: tuple[int, ...]
    """The first of them."""
    blocks: int
    nbytes: dict[str, int] = field(default_factory=dict)
    """By tier."""
    labels: tuple[str, ...] = ()
    """Of the warmed prefixes that end in it."""
    follows: bool
    """Whether more is kept behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """What one slot holds."""

    namespace: str
    busy: bool
    length: int
    tokens: tuple[int, ...]
    """The first of them."""


def first_tokens(tokens: Ids) -> tuple[int, ...]:
    return tuple(tokens[:_SHOWN].tolist())


def runs(
    tiers: Tiers, root: BlockId, parent: str | None, records: Sequence[Record], *, limit: int, after: int
) -> list[PrefixRun] | None:
    """The runs after the one with the id `parent`, or those that start the chain `root`: up to `limit`,
    behind the first `after`. None where `parent` does not lead back to `root`: it is gone, or another's.
    Looking counts as no use of a block."""
    path = _path(tiers, root, parent)
    if path is None:
        return None
    last = path[-1].id if path else root
    before = np.concatenate([entry.tokens for entry in path]) if path else np.empty(0, np.int32)
    left = _BLOCKS
    found = []
    for entry in islice(tiers.children(last), after, after + limit):
        run, follows = _run(tiers, entry, max(1, left))
        left -= len(run)
        found.append(_shown(tiers, run, follows, before, records))
    return found


def _path(tiers: Tiers, root: BlockId, id_: str | None) -> list[Entry] | None:
    """The blocks that lead from `root` to a block."""
    if id_ is None:
        return []
    path: list[Entry] = []
    name = BlockId(bytes.fromhex(id_))
    while name != root:
        entry: Entry | None = tiers.memory.peek(name)
        if entry is None and tiers.lower is not None:
            entry = tiers.lower.lookup(name)
        if entry is None or (path and entry.end != path[-1].start):
            return None
        path.append(entry)
        name = entry.parent
    path.reverse()
    return path


def _run(tiers: Tiers, entry: Entry, most: int) -> tuple[list[Entry], bool]:
    """A block with those that follow it alone, and whether more follow the last of them."""
    run = [entry]
    while True:
        following = list(islice(tiers.children(run[-1].id), 2))
        if len(following) != 1 or len(run) >= most:
            return run, bool(following)
        run.append(following[0])


def _shown(
    tiers: Tiers, run: Sequence[Entry], follows: bool, before: Ids, records: Sequence[Record]
) -> PrefixRun:
    tokens = np.concatenate([entry.tokens for entry in run])
    whole = np.concatenate([before, tokens])
    nbytes: dict[str, int] = {}
    for entry in run:
        kept = tiers.memory.peek(entry.id)
        if kept is not None:
            nbytes[tiers.memory.name] = nbytes.get(tiers.memory.name, 0) + kept.nbytes
        stored = tiers.lower.lookup(entry.id) if tiers.lower is not None else None
        if tiers.lower is not None and stored is not None:
            nbytes[tiers.lower.name] = nbytes.get(tiers.lower.name, 0) + stored.nbytes
    labels = {
        label
        for record in records
        if len(before) < len(record.tokens) <= len(whole)
        and np.array_equal(record.ids, whole[: len(record.tokens)])
        for label in record.labels
    }
    return PrefixRun(
        id=run[-1].id.hex(),
        start=run[0].start,
        length=len(tokens),
        tokens=first_tokens(tokens),
        blocks=len(run),
        nbytes=nbytes,
        labels=tuple(sorted(labels)),
        follows=follows,
    )
