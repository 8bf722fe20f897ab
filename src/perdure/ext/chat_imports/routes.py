"""`/v1/chats/import`: chats that another program exported, as sessions."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request

from perdure.ext.chat_imports.export_file import MOST_BYTES
from perdure.ext.chat_imports.importing import ImportedChats, import_chats
from perdure.spi.server import (
    FILE_TYPE,
    AppStateDep,
    BodyRoute,
    CallerDep,
    ResponseSchema,
    errors,
    receive_file,
)

router = APIRouter(prefix="/v1/chats", tags=["sessions"], route_class=BodyRoute)


class LeftOutChat(ResponseSchema):
    title: str
    why: str


class ChatImportAnswer(ResponseSchema):
    names: list[str]
    """The sessions that were made, one for each chat."""
    branches: int
    """Further sessions, of other branches of these chats."""
    turns: int
    known: int
    """Chats that had been imported before."""
    left_out: list[LeftOutChat]
    not_named: int
    """Chats left out besides those that are named."""

    @classmethod
    def of(cls, made: ImportedChats) -> ChatImportAnswer:
        left_out = [LeftOutChat(title=title, why=why) for title, why in made.left_out]
        return cls.copy_of(made, left_out=left_out)


@router.post(
    "/import",
    status_code=201,
    responses=errors(413, 507),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {FILE_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def import_file(request: Request, app_state: AppStateDep, caller: CallerDep) -> ChatImportAnswer:
    """Sessions of the chats in an export of ChatGPT, Claude or Open WebUI: their zip, or the JSON in it.
    Branches become branches; pictures are not in such files."""
    sessions = app_state.runtime.sessions
    folder = await app_state.call(sessions.temporary_folder)
    try:
        path = Path(folder.name) / "chats"
        await receive_file(request, path, app_state, most=MOST_BYTES)
        made = await app_state.work(import_chats, sessions, path, namespace=caller.namespace)
        return ChatImportAnswer.of(made)
    finally:
        await asyncio.shield(app_state.work(folder.cleanup))
