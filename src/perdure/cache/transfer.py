"""Transfer: the state of a prefix as blocks that another cache can take in."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.cache.block import Block
from perdure.cache.block_cache import BlockCache, Ids, row_width
from perdure.cache.prefix_search import ANY_TOKEN, AT_TAIL_STATES
from perdure.engine.adapters import AdapterSet
from perdure.errors import CorruptStateError, IncompatibleStateError
from perdure.identity import Identity


def pack_prefix(
    cache: BlockCache, tokens: Ids, namespace: str, adapters: AdapterSet | None = None
) -> list[Block]:
    """The blocks that hold `tokens` and nothing else, all of them verified."""
    prefix = cache.load(cache.lookup(tokens, namespace, adapters))
    blocks = list(prefix.blocks)
    if blocks and blocks[-1].end > prefix.length:
        # What follows there is of another conversation that began alike.
        blocks[-1] = blocks[-1].beginning(prefix.length - blocks[-1].start)
    return blocks


def unpack_prefix(
    cache: BlockCache,
    identity: Identity,
    blocks: Sequence[Block],
    namespace: str,
    adapters: AdapterSet | None = None,
) -> int:
    """Take in copies of blocks of another cache, under names of this one. How many tokens, from the
    first on."""
    length = blocks[-1].end if blocks else 0
    here = cache._context.identity_of(cache._context.adapters if adapters is None else adapters, length)
    if cache._exact:
        raise IncompatibleStateError(
            "nothing says in steps of which sizes this state was computed, so exact mode cannot use it; "
            "its tokens can be computed anew",
            field="exact",
        )
    if (field := here.difference(identity)) is not None:
        raise IncompatibleStateError(
            f"this state belongs to another {field}; its tokens can be computed anew", field=field
        )
    for block in blocks:
        if not cache._fits(block):
            raise IncompatibleStateError(
                f"the state of tokens {block.start} to {block.end} is not laid out as this context's own "
                f"({row_width(block)} bytes a token, here {cache._context.row_bytes()}); its tokens can be "
                "computed anew",
                field="row width",
            )
    cache.rule = AT_TAIL_STATES if any(block.has_tail_state for block in blocks) else ANY_TOKEN
    parent, end, taken = cache._root_of(here, namespace), 0, []
    for block in blocks:
        block.verify()
        if block.start != end or (block is not blocks[-1] and len(block.tokens) != cache._size):
            raise CorruptStateError(f"blocks of a state do not follow each other at token {end}")
        rows, tail_state = (None if part is None else part.copy() for part in (block.rows, block.tail_state))
        made = Block.make(parent, end, block.tokens.copy(), rows, tail_state)
        if not cache.tiers.memory.store(made) and not cache.tiers.lower:
            break
        taken.append(made)
        parent, end = made.id, made.end
    cache.tiers.store_lower(taken)
    return end
