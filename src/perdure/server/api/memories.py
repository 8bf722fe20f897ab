"""`/v1/memories`: labelled points of sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from perdure.server.api.session_schemas import (
    MemoryAnswer,
    MemoryList,
    SessionAnswer,
    WakeMemoryRequest,
)
from perdure.server.core.app_state import AppStateDep, CallerDep
from perdure.server.core.schemas import PAGE, DeletedAnswer, Limit, errors, refuse_fields

router = APIRouter(prefix="/v1/memories", tags=["memories"])

Text = Annotated[str | None, Query(max_length=1000)]


@router.get("", responses=errors(404))
async def search(
    app_state: AppStateDep,
    caller: CallerDep,
    label: Text = None,
    kind: Text = None,
    text: Text = None,
    session: Text = None,
    limit: Limit = PAGE,
    after: Text = None,
) -> MemoryList:
    """Memories that fit everything given; `text` is looked for in notes and in what was said."""
    # A search reads everything that was said.
    in_thread = app_state.call if text is None else app_state.work
    found = await in_thread(
        app_state.runtime.memories.search,
        label=label,
        kind=kind,
        text=text,
        session=session,
        namespace=caller.namespace,
        limit=limit + 1,
        after=after,
    )
    return MemoryList(data=[MemoryAnswer.of(memory) for memory in found[:limit]], has_more=len(found) > limit)


@router.post("/wake", status_code=201, responses=errors(404, 409, 422, 507))
async def wake(asked: WakeMemoryRequest, app_state: AppStateDep, caller: CallerDep) -> SessionAnswer:
    """A new session at a memory."""
    refuse_fields(asked, strict=app_state.strict, refused={}, notes=caller.notes)
    return await app_state.call(
        lambda: SessionAnswer.of(
            app_state.runtime.memories.wake(asked.address, asked.name, namespace=caller.namespace)
        )
    )


@router.delete("", responses=errors(404, 507))
async def forget(
    app_state: AppStateDep, caller: CallerDep, address: Annotated[str, Query(min_length=1, max_length=1000)]
) -> DeletedAnswer:
    """Forget a memory. The session that it is of stays."""
    await app_state.call(app_state.runtime.memories.forget, address, caller.namespace)
    return DeletedAnswer(deleted=1)
