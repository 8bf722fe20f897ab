"""SGLang's routes for sessions: `/open_session`, `/close_session`.

POST /open_session   {"session_id": "s2"}                "s2"
...                  {"messages": […], "session_params": {"id": "s2"}}
POST /close_session  {"session_id": "s2"}                its state leaves the slots, its turns stay
"""

from __future__ import annotations

import uuid

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import JSONResponse, Response

from perdure.spi.server import (
    AppStateDep,
    BodyRoute,
    CallerDep,
    RequestSchema,
    ServedDep,
    errors,
    invalid,
    is_id,
    named_conversations,
    refuse_fields,
)

router = APIRouter(tags=["SGLang"], route_class=BodyRoute)


class OpenSessionRequest(RequestSchema):
    session_id: str | None = None
    """Its name; a new one, if left out."""
    capacity_of_str_len: int | None = Field(None, ge=0)
    """Taken: a session has the context of its model."""
    streaming: bool | None = None
    """Taken."""
    timeout: float | None = Field(None, ge=0)
    """Taken: `session_params.keep` of a request says how long its state is kept."""


class CloseSessionRequest(RequestSchema):
    session_id: str


@router.post("/open_session", responses=errors(), response_model=str)
async def open_session(body: OpenSessionRequest, app_state: AppStateDep, caller: CallerDep) -> Response:
    """The name of a session. It is made with the first request that names it by `session_params.id`."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    name = uuid.uuid4().hex if body.session_id is None else body.session_id
    return JSONResponse(_checked(name))


@router.post("/close_session", responses=errors(404), response_model=None)
async def close_session(body: CloseSessionRequest, app_state: ServedDep, caller: CallerDep) -> Response:
    """Have the state of a session leave the slots. Its turns, and what is on the disk, stay."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    name = f"sglang:{_checked(body.session_id)}"
    for conversations in named_conversations():
        await app_state.work(conversations.release, app_state.runtime, name, caller.namespace)
    return Response(status_code=200)


def _checked(name: str) -> str:
    if not is_id(name):
        raise invalid("session_id", f"{name[:100]!r} is no name: up to 100 letters, digits and . _ : -")
    return name
