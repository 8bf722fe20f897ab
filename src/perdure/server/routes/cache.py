"""`/v1/cache`: prefixes that are kept."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from perdure.cache.prefix_cache import CacheStats
from perdure.cache.record import Record
from perdure.server.app_state import AppState, AppStateDep, CallerDep
from perdure.server.routes.responses import errors
from perdure.server.schemas.base import refuse_fields
from perdure.server.schemas.session import (
    CacheAnswer,
    DeletedAnswer,
    RecordAnswer,
    TotalsAnswer,
    WarmRequest,
)

router = APIRouter(prefix="/v1/cache", tags=["cache"])


@router.get("", responses=errors())
async def read(app_state: AppStateDep, caller: CallerDep) -> CacheAnswer:
    """Your warmed prefixes, and on a server without keys what the whole cache holds."""
    return await app_state.call(_read, app_state, caller.namespace)


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


def _record(record: Record) -> RecordAnswer:
    return RecordAnswer(tokens=len(record.tokens), kept=record.kept, labels=sorted(record.labels))


def _read(app_state: AppState, namespace: str) -> CacheAnswer:
    records = app_state.runtime.cache.records(namespace=namespace)
    totals = None if len(app_state.keys) else _totals(app_state.runtime.cache.stats())
    return CacheAnswer(records=[_record(record) for record in records], totals=totals)


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
