"""`/v1/documents/text`: the text of a PDF, and how many tokens it has."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request

from perdure.ext.documents.pdf import MOST_BYTES, pdf_text
from perdure.spi.server import (
    FILE_TYPE,
    BodyRoute,
    ResponseSchema,
    ServedDep,
    errors,
    receive_file,
)

router = APIRouter(prefix="/v1/documents", tags=["documents"], route_class=BodyRoute)


class DocumentText(ResponseSchema):
    text: str
    pages: int
    tokens: int
    """Of the text alone."""


@router.post(
    "/text",
    responses=errors(413, 507),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {FILE_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def document_text(request: Request, app_state: ServedDep) -> DocumentText:
    """The text of a PDF, for a message. Nothing of the file is kept."""
    folder = await app_state.call(app_state.runtime.sessions.temporary_folder)
    try:
        path = Path(folder.name) / "document"
        await receive_file(request, path, app_state, most=MOST_BYTES)

        def read() -> DocumentText:
            found = pdf_text(path)
            tokens = len(app_state.runtime.model.tokenize(found.text, bos=False))
            return DocumentText(text=found.text, pages=found.pages, tokens=tokens)

        return await app_state.work(read)
    finally:
        await asyncio.shield(app_state.work(folder.cleanup))
