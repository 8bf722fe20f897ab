"""`/v1/memories`: labelled points of sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from perdure.server.desk import ACaller, ADesk
from perdure.server.routes.documented import errors
from perdure.server.shapes.base import PAGE, Limit, refuse_fields
from perdure.server.shapes.session import (
    DeletedAnswer,
    MemoryAnswer,
    MemoryList,
    SessionAnswer,
    WakeMemoryRequest,
)

router = APIRouter(prefix="/v1/memories", tags=["memories"])

Text = Annotated[str | None, Query(max_length=1000)]


@router.get("", responses=errors(404))
async def search(
    desk: ADesk,
    caller: ACaller,
    label: Text = None,
    kind: Text = None,
    text: Text = None,
    session: Text = None,
    limit: Limit = PAGE,
    after: Text = None,
) -> MemoryList:
    """Memories that fit everything given; `text` is looked for in notes and in what was said."""
    found = await desk.call(
        desk.runtime.memories.search,
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
async def wake(asked: WakeMemoryRequest, desk: ADesk, caller: ACaller) -> SessionAnswer:
    """A new session at a memory."""
    refuse_fields(asked, strict=desk.strict, refused={})
    return await desk.call(
        lambda: SessionAnswer.of(
            desk.runtime.memories.wake(asked.address, asked.name, namespace=caller.namespace)
        )
    )


@router.delete("", responses=errors(404, 507))
async def forget(
    desk: ADesk, caller: ACaller, address: Annotated[str, Query(min_length=1, max_length=1000)]
) -> DeletedAnswer:
    """Forget a memory. The session that it is of stays."""
    await desk.call(desk.runtime.memories.forget, address, caller.namespace)
    return DeletedAnswer(deleted=1)
