"""Reuse reason: why no more of a prompt could be reused, in words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block_cache import BlockCache
from perdure.engine.context import Context


def why_not_more(
    blocks: BlockCache,
    tokens: NDArray[np.int32],
    namespace: str,
    *,
    reused: int,
    reach: int,
    shared: int,
    exact: int | None,
    budget: int,
) -> str:
    """Why just `reused` of `tokens` were, where `reach` could have been moved from elsewhere and `shared` are
    held in some form. `exact` is the step of exact mode, `budget` what all that is held keeps to."""
    if reused >= len(tokens):
        return "all but the last token, whose logits are needed"
    if reach > reused:
        return f"moving {reach} tokens from elsewhere costs more than computing them"
    if shared > reused and exact is not None:
        return (
            f"exact mode goes on where a step of {exact} prompt tokens ended: what came after "
            f"token {reused}, such as a reply, is read again"
        )
    if shared > reused:
        went = f"it went back to {reused}" if reused else "nothing before it is left to go back to"
        return f"a {blocks.memory} memory has no checkpoint at token {shared}: {went}"
    if blocks.was_evicted(tokens, namespace, shared):
        return f"what followed token {shared} was evicted: the budget is {budget} bytes"
    if reused:
        return f"first difference at token {reused}"
    if field_name := blocks.changed(tokens, namespace):
        return f"the identity changed in its {field_name}"
    return "nothing like it is held"


def why_not_exact(context: Context) -> str | None:
    """Why state that is put back would not be the same bits as state that was computed in place, if so."""
    if context.capabilities.shared:
        return "exact mode reuses nothing in a pool of cells: what follows depends on where they lie"
    if context.identity.attention == "plain":
        return "exact mode reuses nothing without flash attention: what follows depends on where cells lie"
    if not context.memory.restores_bits:
        return "exact mode reuses nothing of a window that is not kept: it comes back in another order"
    return None
