"""Drop plans: what goes with kept prefixes, and what of it others still need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import BLOCK, AnyBlock, BlockId, block_id
from perdure.cache.kept_prefixes import KeptPrefixes
from perdure.cache.prefix_search import ReuseRule, Source, beginnings, continuations
from perdure.decode.request import KeptPrefix

Ids = NDArray[np.int32]


class Blocks(Source[AnyBlock], Protocol):
    """Where blocks are found."""

    def lookup(self, block: BlockId) -> AnyBlock | None: ...


@dataclass(frozen=True, slots=True)
class DropPlan:
    """What goes with prefixes: blocks, and the lengths that are still needed of some of those."""

    drop: tuple[BlockId, ...]
    shorten: tuple[tuple[AnyBlock, int], ...]


def drop_plan(blocks: Blocks, gone: Sequence[KeptPrefix], needs: KeptPrefixes, rule: ReuseRule) -> DropPlan:
    """What goes on from the prefixes `gone`, and what leads only there; what one of `needs` needs stays.

    Where blocks cannot be cut, one that runs on past a prefix is of no use to it.
    """
    drop: dict[BlockId, None] = {}
    met: dict[BlockId, tuple[AnyBlock, int]] = {}
    for prefix in gone:
        tokens = prefix.ids
        level: list[tuple[BlockId, int]] = [(BlockId(prefix.root), 0)]
        after: list[tuple[AnyBlock, Ids]] = []
        while level:
            parent, at = level.pop()
            for block in beginnings(blocks, parent, tokens[at : min(at + BLOCK, len(tokens) - 1)]):
                level.append((block.id, at + len(block.tokens)))
                if block.id not in met:
                    met[block.id] = (
                        block,
                        _needed(blocks, prefix.root, block, tokens[:at], needs, rule),
                    )
            if len(tokens) - at <= BLOCK:
                after += ((block, tokens[:at]) for block in continuations(blocks, parent, tokens[at:]))
        for block, before in after:
            needed = _needed(blocks, prefix.root, block, before, needs, rule)
            if needed:
                met[block.id] = block, needed
                so_far = np.concatenate([before, block.tokens])
                after += ((child, so_far) for child in blocks.children(block.id))
            else:
                drop[block.id] = None
    shorten = []
    # The last ones first: what has nothing behind it any more is cut to what is needed of it, or goes too.
    for block, needed in sorted(met.values(), key=lambda each: -each[0].start):
        if block.id in drop or any(child.id not in drop for child in blocks.children(block.id)):
            continue
        if not needed:
            drop[block.id] = None
        elif needed < block.end and not block.has_tail_state:
            shorten.append((block, needed))
    return DropPlan(tuple(drop), tuple(shorten))


def _needed(
    blocks: Blocks, root: bytes, block: AnyBlock, before: Ids, needs: KeptPrefixes, rule: ReuseRule
) -> int:
    """How long a prefix that needs this block is; 0 where none does."""
    so_far = np.concatenate([before, block.tokens])
    if needs.passes(root, so_far):
        return len(so_far)
    if rule.cuts_blocks:
        for length in needs.ends_within(root, so_far, len(before)):
            # It may be kept to its end without this one.
            if blocks.lookup(block_id(block.parent, block.tokens[: length - len(before)])) is None:
                return length
    return 0
