"""`/v1/cache`: prefixes that are kept."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query

from perdure.cache.prefix_cache import CacheStats
from perdure.decode.slots import KeptPrefix
from perdure.server.api_error import ApiError
from perdure.server.app_state import AppState, AppStateDep, CallerDep
from perdure.server.schemas.base import PAGE, DeletedAnswer, Limit, refuse_fields
from perdure.server.schemas.cache import (
    BlockAnswer,
    BlockList,
    CacheAnswer,
    RecordAnswer,
    RunAnswer,
    RunList,
    TotalsAnswer,
    WarmRequest,
)
from perdure.server.schemas.openapi import errors

router = APIRouter(prefix="/v1/cache", tags=["cache"])

OptionalId = Annotated[str | None, Query(pattern="^[0-9a-f]{64}$")]


@router.get("", responses=errors())
async def read(
    app_state: AppStateDep, caller: CallerDep, limit: Limit = PAGE, after: OptionalId = None
) -> CacheAnswer:
    """Your warmed prefixes, a page of them behind the one with the id `after`; and on a server without keys
    what the whole cache holds."""
    return await app_state.call(_read, app_state, caller.namespace, limit, after)


@router.get("/blocks", responses=errors())
async def blocks(
    app_state: AppStateDep, caller: CallerDep, limit: Limit = PAGE, after: OptionalId = None
) -> BlockList:
    """The blocks that are kept of yours, each before those that follow it: a page of them, behind the one
    with the id `after`."""
    found = await app_state.call(
        app_state.runtime.cache.blocks, namespace=caller.namespace, limit=limit + 1, after=after
    )
    data = [BlockAnswer(**asdict(block)) for block in found[:limit]]
    return BlockList(data=data, has_more=len(found) > limit)


@router.get("/tree", responses=errors(404))
async def tree(
    app_state: AppStateDep,
    caller: CallerDep,
    parent: Annotated[str | None, Query(pattern=r"^[0-9a-f]{64}$")] = None,
    limit: Limit = PAGE,
    after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
) -> RunList:
    """What is kept for you as a tree of shared prefixes: what starts it, or follows the run `parent`."""
    return await app_state.call(_runs, app_state, caller.namespace, parent, limit, after)


@router.post("/warm", status_code=201, responses=errors(507))
async def warm(asked: WarmRequest, app_state: AppStateDep, caller: CallerDep) -> RecordAnswer:
    """Compute a prefix once, and keep it."""
    refuse_fields(asked, strict=app_state.strict, refused={})
    record = await app_state.work(
        app_state.runtime.cache.warm, asked.prompt, labels=asked.labels, namespace=caller.namespace
    )
    return _record(record)


@router.delete("", responses=errors(507))
async def clear(
    app_state: AppStateDep,
    caller: CallerDep,
    label: Annotated[list[str], Query(description="May be given again; all of yours if left out")] = [],  # noqa: B006
) -> DeletedAnswer:
    """Drop your prefixes that carry one of the labels, wherever they are kept; or all of yours."""
    return DeletedAnswer(
        deleted=await app_state.call(app_state.runtime.cache.clear, label or None, namespace=caller.namespace)
    )


def _record(record: KeptPrefix) -> RecordAnswer:
    return RecordAnswer(
        id=record.id, tokens=len(record.tokens), kept=record.kept, labels=sorted(record.labels)
    )


def _runs(app_state: AppState, namespace: str, parent: str | None, limit: int, after: int) -> RunList:
    runtime = app_state.runtime
    found = runtime.cache.runs(parent, namespace=namespace, limit=limit + 1, after=after)
    if found is None:
        raise ApiError(
            404,
            "this prefix is no longer kept: look at the tree again",
            kind="not_found_error",
            param="parent",
            code="not_found",
        )
    data = [
        RunAnswer(
            id=run.id,
            start=run.start,
            tokens=run.length,
            text=runtime.model.detokenize(run.tokens, special=True),
            blocks=run.blocks,
            nbytes=run.nbytes,
            labels=list(run.labels),
            follows=run.follows,
        )
        for run in found[:limit]
    ]
    return RunList(data=data, has_more=len(found) > limit)


def _read(app_state: AppState, namespace: str, limit: int, after: str | None) -> CacheAnswer:
    records = app_state.runtime.cache.records(namespace=namespace, limit=limit + 1, after=after)
    totals = None if len(app_state.keys) else _totals(app_state.runtime.cache.stats())
    return CacheAnswer(
        records=[_record(record) for record in records[:limit]], has_more=len(records) > limit, totals=totals
    )


def _totals(stats: CacheStats) -> TotalsAnswer:
    return TotalsAnswer(
        blocks=stats.blocks,
        nbytes=stats.nbytes,
        budget=stats.budget,
        disk_bytes=stats.disk_bytes,
        evicted=stats.evicted,
        reused_tokens=dict(stats.reused_tokens),
        computed_tokens=stats.computed_tokens,
    )
