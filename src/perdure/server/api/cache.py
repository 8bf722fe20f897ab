"""`/v1/cache`: prefixes that are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field

from perdure.cache.cache_view import BlockInfo
from perdure.cache.prefix_cache import CacheStats
from perdure.decode.request import KeptPrefix
from perdure.errors import BusyError, ContextOverflow, InvalidInputError, PerdureError
from perdure.server.core.api_error import ApiError
from perdure.server.core.app_state import AppState, AppStateDep, CallerDep, LoadedDep, ServedDep
from perdure.server.core.body_route import BodyRoute
from perdure.server.core.schemas import (
    PAGE,
    DeletedAnswer,
    Items,
    Label,
    Limit,
    RequestSchema,
    ResponseSchema,
    errors,
    refuse_fields,
)
from perdure.server.core.visit import Visit


class WarmRequest(RequestSchema):
    prompt: str | Annotated[Items[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    labels: list[Label] = Field(default_factory=list, max_length=64)


class RecordAnswer(ResponseSchema):
    """A prefix that was warmed."""

    id: str
    tokens: int
    kept: int
    labels: list[str]


class RunAnswer(ResponseSchema):
    """Tokens that are kept in one run, up to where several prefixes part or none goes on."""

    id: str
    start: int
    """How many tokens come before it."""
    tokens: int
    text: str
    """The first of it."""
    blocks: int
    nbytes: dict[str, int]
    """By tier."""
    labels: list[str]
    """Of the warmed prefixes that end in it."""
    follows: bool
    """Whether more is kept behind it: ask with `parent`, its id."""


class RunList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[RunAnswer]
    has_more: bool
    """Whether there are more beside these: ask with `after`, how many were given so far."""


class BlockList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[BlockInfo]
    has_more: bool
    """Whether there are more behind these: ask with `after`, the id of the last one."""


class CacheAnswer(ResponseSchema):
    records: list[RecordAnswer]
    has_more: bool
    """Whether there are more records behind these: ask with `after`, the id of the last one."""
    totals: CacheStats | None
    """Only on a server without keys: where there are several callers, it is nobody's business."""


router = APIRouter(prefix="/v1/cache", tags=["cache"], route_class=BodyRoute)

OptionalId = Annotated[str | None, Query(pattern="^[0-9a-f]{64}$")]


@router.get("", responses=errors(404))
async def read(
    app_state: LoadedDep, caller: CallerDep, limit: Limit = PAGE, after: OptionalId = None
) -> CacheAnswer:
    """Your warmed prefixes, a page of them behind the one with the id `after`; and on a server without keys
    what the whole cache holds."""
    if not app_state.is_loaded:
        return CacheAnswer(records=[], has_more=False, totals=None)
    return await app_state.call(_read, app_state, caller.namespace, limit, after)


@router.get("/blocks", responses=errors(404))
async def blocks(
    app_state: LoadedDep, caller: CallerDep, limit: Limit = PAGE, after: OptionalId = None
) -> BlockList:
    """The blocks that are kept of yours, each before those that follow it: a page of them, behind the one
    with the id `after`."""
    if not app_state.is_loaded:
        return BlockList(data=[], has_more=False)
    page = await app_state.call(
        app_state.runtime.cache.blocks, namespace=caller.namespace, limit=limit + 1, after=after
    )
    return BlockList(data=page[:limit], has_more=len(page) > limit)


@router.get("/tree", responses=errors(404))
async def tree(
    app_state: LoadedDep,
    caller: CallerDep,
    parent: Annotated[str | None, Query(pattern=r"^[0-9a-f]{64}$")] = None,
    limit: Limit = PAGE,
    after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
) -> RunList:
    """What is kept for you as a tree of shared prefixes: what starts it, or follows the run `parent`."""
    if not app_state.is_loaded:
        return RunList(data=[], has_more=False)
    return await app_state.call(_runs, app_state, caller.namespace, parent, limit, after)


@router.post("/warm", status_code=201, responses=errors(404, 507))
async def warm(body: WarmRequest, app_state: ServedDep, caller: CallerDep) -> RecordAnswer:
    """Compute a prefix once, and keep it."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    runtime, prompt = app_state.runtime, body.prompt
    try:
        # Nobody can end it: a client that leaves pays for it all the same.
        record = await app_state.work(
            runtime.cache.warm, prompt, labels=body.labels, namespace=caller.namespace
        )
    except (InvalidInputError, ContextOverflow, BusyError):
        raise
    except PerdureError:
        # It was computed, as far as anybody can tell, and could not be kept.
        tokens = await app_state.call(runtime.model.tokenize, prompt) if isinstance(prompt, str) else prompt
        caller.charge(len(tokens))
        raise
    caller.charge(len(record.tokens))
    return _record(record)


@router.delete("", responses=errors(507))
async def clear(
    app_state: AppStateDep,
    caller: CallerDep,
    label: Annotated[list[str], Query(description="May be given again; all of yours if left out")] = [],  # noqa: B006
) -> DeletedAnswer:
    """Drop your prefixes that carry one of the labels, wherever they are kept; or all of yours. With several
    models, those of each: one that is not loaded is loaded for that."""
    deleted = 0
    for name in [model.name for model in app_state.server.models.pooled] or [""]:
        visit = Visit()
        try:
            served = await app_state.serving(name, visit)
            deleted += await served.call(
                served.runtime.cache.clear, label or None, namespace=caller.namespace
            )
            if not label:
                await served.call(served.forget, caller.namespace)
        finally:
            visit.close()
    return DeletedAnswer(deleted=deleted)


def _record(record: KeptPrefix) -> RecordAnswer:
    return RecordAnswer.copy_of(record, tokens=len(record.tokens), labels=sorted(record.labels))


def _runs(app_state: AppState, namespace: str, parent: str | None, limit: int, after: int) -> RunList:
    runtime = app_state.runtime
    runs = runtime.cache.runs(parent, namespace=namespace, limit=limit + 1, after=after)
    if runs is None:
        raise ApiError(
            404, "this prefix is no longer kept: look at the tree again", param="parent", code="not_found"
        )
    data = [
        RunAnswer.copy_of(
            run,
            tokens=run.length,
            text=runtime.model.detokenize(run.tokens, special=True),
            labels=list(run.labels),
        )
        for run in runs[:limit]
    ]
    return RunList(data=data, has_more=len(runs) > limit)


def _read(app_state: AppState, namespace: str, limit: int, after: str | None) -> CacheAnswer:
    records = app_state.runtime.cache.records(namespace=namespace, limit=limit + 1, after=after)
    totals = None if app_state.server.keys.required else app_state.runtime.cache.stats()
    return CacheAnswer(
        records=[_record(record) for record in records[:limit]], has_more=len(records) > limit, totals=totals
    )
