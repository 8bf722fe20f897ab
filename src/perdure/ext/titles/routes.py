"""`/v1/sessions/{name}/title`: a title for a conversation, written by the model while it is idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field

from perdure import ChatReply
from perdure.ext.titles.title import ask_for_title, title_of
from perdure.spi.server import (
    BodyRoute,
    CallerDep,
    Named,
    RequestSchema,
    ResponseSchema,
    ServedDep,
    answer,
    errors,
    refuse_fields,
)

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=BodyRoute)


class TitleRequest(RequestSchema):
    instead_of: Annotated[str, Field(max_length=200)] = ""
    """The title that it takes the place of: one that a person gave meanwhile stays."""


class TitleAnswer(ResponseSchema):
    title: str
    written: bool
    """Whether the model wrote it just now."""


@router.post("/{name}/title", responses=errors(404, 504))
async def write_title(
    name: Named, body: TitleRequest, request: Request, app_state: ServedDep, caller: CallerDep
) -> TitleAnswer:
    """Have the model write a title, once no other request is served. Without one the title stays: where
    another was given, the reply is none, or the conversation's state is in no slot and would have to be moved
    there. The key of the request pays for its tokens."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    sessions, namespace = app_state.runtime.sessions, caller.namespace

    def title() -> str:
        return str(sessions.get(name, namespace).origin.get("title", ""))

    if (before := await app_state.call(title)) != body.instead_of:
        return TitleAnswer(title=before, written=False)
    stream = await app_state.call(lambda: ask_for_title(sessions.get(name, namespace)))
    if stream is None:
        return TitleAnswer(title=before, written=False)

    def text(replies: Sequence[ChatReply]) -> str:
        return title_of(replies[0].text)

    written = await answer(stream, request, app_state, caller, whole=text)

    def keep() -> TitleAnswer:
        now = title()
        if not written or now != before:
            return TitleAnswer(title=now, written=False)
        sessions.get(name, namespace).note({"title": written})
        return TitleAnswer(title=str(written), written=True)

    return await app_state.call(keep)
